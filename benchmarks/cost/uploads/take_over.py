"""Seconds until a standby leads, after the leading aggregator was stopped, killed or paused.

`cost take-over --store URL` runs two aggregators on a schema of its own, which it deletes. They take turns: the one
that was ended is started again, and is the standby.
"""

import contextlib
import secrets
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.cost.uploads.databases import deleted
from benchmarks.cost.uploads.ingest import ROOT, TASK
from benchmarks.processes import mosquitto, running
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ProtofleetError
from protocol.mqtt.reconnecting_session import BrokerAddress

if TYPE_CHECKING:
    import subprocess

LEADS, WAITS = "connected to the broker", "standby: another aggregator leads"
TIMEOUT_S = 120.0
POLL_S = 0.01
SIGNALS = {"stopped": signal.SIGTERM, "killed": signal.SIGKILL, "paused": signal.SIGSTOP}


@click.command("take-over")
@click.option(
    "--store",
    "database",
    required=True,
    metavar="URL",
    envvar="PROTOFLEET_STORE",
    show_envvar=True,
    help="PostgreSQL database in which it may create schemas.",
)
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True)
@json_option
def command(*, database: str, repetitions: int, json_file: Path | None) -> None:
    """Measure how soon a standby leads."""
    fleet = f"benchmark-{secrets.token_hex(4)}"
    table = Table({"the leader is": "<14", "median s": ">9.1f", "least s": ">9.1f", "most s": ">9.1f"})
    runs: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as name,
        deleted(database, fleet),
        mosquitto(Path(name)) as broker,
        contextlib.ExitStack() as processes,
    ):
        leader, standby = (
            Aggregator(Path(name) / each, fleet, broker, database) for each in ("first", "second")
        )
        for each in (leader, standby):
            processes.callback(each.close)
        leader.start()
        leader.wait(LEADS)
        leader.copy_to(standby)
        for how, number in SIGNALS.items():
            runs[how] = []
            for _ in range(repetitions):
                standby.start()
                standby.wait(WAITS)
                runs[how].append(standby.seconds_to_lead(after=leader, signal_number=number))
                leader.close()
                leader, standby = standby, leader
            table.row(how, statistics.median(runs[how]), min(runs[how]), max(runs[how]))
    write_json(json_file, "take-over", tables=[table], runs=runs)


class Aggregator:
    """An aggregator with a state directory of its own, started and ended many times."""

    def __init__(self, state: Path, fleet: str, broker: BrokerAddress, database: str) -> None:
        self.state = state
        self._log = state.with_suffix(".log")
        task = state.with_suffix(".toml")
        task.write_text(TASK.format(fleet=fleet, backbone=ROOT / "examples" / "quickstart" / "backbone.onnx"))
        where = ("--state", str(state), "--broker", str(broker), "--store", database)
        self._arguments = ("run", "--task", str(task), *where)
        self._stack = contextlib.ExitStack()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, with an empty log."""
        self.process = self._stack.enter_context(running("aggregator.cli", *self._arguments, log=self._log))

    def close(self) -> None:
        """End the process, also if it is paused."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
        self._stack.close()

    def copy_to(self, other: "Aggregator") -> None:
        """Give another aggregator the fleet's keys and blobs."""
        other.state.mkdir()
        shutil.copytree(self.state / "identity", other.state / "identity")
        (other.state / "blobs").symlink_to(self.state / "blobs")

    def wait(self, text: str) -> None:
        """Wait until the log of this start contains a text.

        Raises:
            ProtofleetError: it does not within TIMEOUT_S.
        """
        deadline_s = time.monotonic() + TIMEOUT_S
        while text not in self._log.read_text():
            if time.monotonic() > deadline_s:
                raise ProtofleetError(f"not within {TIMEOUT_S:.0f} s: {text}: {self._log.read_text()[-500:]}")
            time.sleep(POLL_S)

    def seconds_to_lead(self, *, after: "Aggregator", signal_number: signal.Signals) -> float:
        """Send the leader a signal, and return the seconds until this one is connected to the broker."""
        if after.process is None:
            raise ProtofleetError("no leader")
        time.sleep(secrets.randbelow(2000) / 1000)  # any moment between two attempts of the standby
        start_s = time.monotonic()
        after.process.send_signal(signal_number)
        self.wait(LEADS)
        return time.monotonic() - start_s
