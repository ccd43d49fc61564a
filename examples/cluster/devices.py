"""The devices of the example: real device programs, each with images, a key and a state of its own."""

import io
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from examples.cluster.processes import Processes, Program
from examples.quickstart.folder import FLEET, Folder

_SUBMITTED = re.compile(r"submission received by the aggregator digest=([0-9a-f]{64})")


class Devices:
    """All devices, which one program forks.

    Args:
        folder: of their images and states.
        logs: folder of a log file for each.
        processes: what starts the program.
        name: of the program.
    """

    def __init__(self, folder: Folder, logs: Path, processes: Processes, *, name: str = "devices") -> None:
        self.started: list[str] = []
        self._folder = folder
        self._logs = logs
        logs.mkdir()
        command = (sys.executable, "-m", "examples.cluster.fork_devices")
        # One thread for matrices: there is a process for each device.
        program = Program(name=name, role="", command=command, environment={"OMP_NUM_THREADS": "1"})
        self._requests = processes.start(program).stdin or io.BytesIO()

    def start(self, devices: Iterable[str], brokers: Sequence[str]) -> None:
        """Start devices with these brokers; each begins with another one."""
        for name in devices:
            first = len(self.started) % len(brokers)
            arguments = (
                *("--broker", ",".join([*brokers[first:], *brokers[:first]])),
                *("--fleet", FLEET, "--device-id", name, "--threads", "1", "--workers", "1"),
                *("--data", self._folder.images(name), "--state", self._folder.state(name)),
            )
            line = json.dumps([str(self._logs / f"{name}.log"), *map(str, arguments)])
            self._requests.write(line.encode() + b"\n")
            self.started.append(name)
        self._requests.flush()

    def building(self) -> set[str]:
        """Return the devices that have built their submission."""
        return {name for name in self.started if "submission built" in self.log(name)}

    def submissions(self) -> dict[str, str]:
        """Return the digest of each submission that the aggregator has acknowledged, for each device."""
        found = {name: _SUBMITTED.findall(self.log(name)) for name in self.started}
        return {name: digests[-1] for name, digests in found.items() if digests}

    def with_head(self) -> set[str]:
        """Return the devices that use a head."""
        return {name for name in self.started if "head in use" in self.log(name)}

    def log(self, name: str) -> str:
        """Return the output of a device."""
        file = self._logs / f"{name}.log"
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
