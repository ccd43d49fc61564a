"""A coordinator and receivers as processes, on a broker."""

import contextlib
from pathlib import Path

from aggregator.storage.open_store import open_store
from aggregator.storage.programs import ReceiverRecord
from protocol.wire.topics import SHARDS
from tests.support.fleets.fleet import Fleet
from tests.support.fleets.startup_code import with_startup_code

WITHOUT_LARGE_PACKAGES = """
import sys
for name in ("torch", "onnx", "onnxruntime", "onnxscript", "scipy", "sklearn"):
    sys.modules[name] = None
"""
"""Startup code of a machine that lacks the large packages."""


class Cluster(Fleet):
    """A coordinator and receivers that share a state folder and a database of PostgreSQL."""

    def start_coordinator(self, task: Path, *options: str) -> None:
        arguments = ("--task", task, "--state", self.aggregator_state, "--broker", str(self.broker))
        self.start("aggregator", self.aggregator_program, "coordinate", *arguments, *options)
        self.wait_for_log("aggregator", "connected to the broker")

    def start_receiver(self, name: str, *options: str, state: Path | None = None) -> None:
        """Start a receiver, on a machine that lacks the large packages."""
        environment = with_startup_code(self.root / "packages", WITHOUT_LARGE_PACKAGES)
        arguments = ("--name", name, "--state", state or self.aggregator_state, "--broker", str(self.broker))
        program = "aggregator.cli.__main__"  # no fork of a process that has imported them
        self.start(name, program, "receive", *arguments, *options, environment=environment)

    def stored(self, task: bytes) -> dict[str, bytes]:
        """Return the digest of each device's stored submission."""
        with contextlib.closing(open_store(self.aggregator_state, read_only=True)) as store:
            return {device: entry.digest for device, entry in store.entries(task).items()}

    def check(self) -> None:
        for name, process in self.processes.items():
            assert process.poll() in (None, -9, 137), f"{name} has ended\n{self.diagnostics()}"

    def receivers(self) -> dict[str, ReceiverRecord]:
        with contextlib.closing(open_store(self.aggregator_state, read_only=True)) as store:
            return {name: record for name, (_, record) in store.receivers.all().items()}

    def wait_until_divided(self, *names: str) -> None:
        """Wait until these receivers have all shards, each one only once, and are connected."""

        def is_divided() -> bool:
            found = self.receivers()
            shards = [shard for name in found.keys() & names for shard in found[name].shards]
            if not found.keys() >= set(names):
                return False
            return sorted(shards) == list(range(SHARDS)) and all(
                self.log(name).rstrip().rpartition("shards=")[2] == str(len(found[name].shards))
                for name in names
            )

        self.wait_until(f"the shards divided among {names}", is_divided, pause_s=0.2)
