"""Ways through the programs: how many functions of the project a real fleet enters from an event to its effect.

An aggregator and six devices run as programs of their own, on the digits of the demo. The aggregator with its jobs and
one device record which functions they enter in each phase; the other devices only submit. What falls into a phase by
chance, such as what happens once a minute, is not entered in each of several runs.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

import click

from benchmarks.function_calls import FOLDER, PROGRAM
from benchmarks.processes import ROOT, mosquitto, running_program, wait_for_log
from benchmarks.report import Table, json_option, write_json
from protocol.errors import ProtofleetError

WAYS = {
    "aggregator: start to connection": ("aggregator", "start"),
    "aggregator: frame to disk": ("aggregator", "submission"),
    "aggregator: submissions to head": ("aggregator", "training"),
    "aggregator: command to devices": ("aggregator", "command"),
    "device: start to connection": ("device", "start"),
    "device: image to frame": ("device", "submission"),
    "device: head to prediction": ("device", "head"),
}
"""Program and phase of each way."""

PHASES = ("other", "start", "submission", "training", "head", "command")
DEVICES = tuple(f"device-{number}" for number in range(6))
"""Outlier detection needs five others beside the recorded one, which is the last."""
DEADLINE_S = 60
"""Seconds from the first submission to the training: every device has submitted by then."""
SETTLED_S = 2.0
"""Seconds after a line in a log within which everything that follows from it has happened."""
COLUMNS = {"way": "<34", "functions": ">11", "files": ">7"}
BACKBONE = ROOT / "examples" / "quickstart" / "backbone.onnx"
HOOK = """\
from benchmarks.function_calls import record

record()
"""
"""A file that Python runs when it starts."""
TASK = f"""\
classes = {json.dumps([*"0123456789"])}
backbones = ["{BACKBONE}"]
quorum = {len(DEVICES) + 1}
deadline_s = {DEADLINE_S}
training.calibrate = false
"""
TIMEOUT_S = 300.0


@click.command("ways")
@click.option(
    "--repetitions",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Count the functions that each of so many fleets enters.",
)
@click.option("--functions", is_flag=True, help="Also list the functions of each way.")
@json_option
def command(*, repetitions: int, functions: bool, json_file: Path | None) -> None:
    """Count the functions that a fleet enters, from an event to its effect."""
    runs = []
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory() as folder, mosquitto(Path(folder)) as broker:
            runs.append(Recording(Path(folder), str(broker)).run())
    entered = {way: set.intersection(*(run[way] for run in runs)) for way in WAYS}
    table = Table(COLUMNS)
    for way, names in entered.items():
        table.row(way, len(names), len({name.partition(":")[0] for name in names}))
    if functions:
        for way, names in entered.items():
            click.echo("\n".join(("", way, *sorted(names))))
    write_json(json_file, "ways", tables=[table])


class Recording:
    """A fleet in a folder; some of its programs record the functions that they enter."""

    def __init__(self, folder: Path, broker: str) -> None:
        from examples.quickstart import (
            digits,
        )  # scikit-learn, which `python -m benchmarks --help` does not need

        self._folder = folder
        self._broker = broker
        self._calls = folder / "calls"
        self._calls.mkdir()
        (folder / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
        (folder / "task.toml").write_text(TASK, encoding="utf-8")
        data = digits.load()
        deal = digits.deal(data.labels, devices=len(DEVICES), seed=0)
        for name, share in zip(DEVICES, deal.shares, strict=True):
            digits.write_images(folder / "images" / name, data, share)

    def run(self) -> dict[str, set[str]]:
        """Run the fleet, and return the functions of each way.

        Raises:
            ProtofleetError: a program did not do what it should.
        """
        *others, recorded = DEVICES
        images = self._folder / "images" / recorded
        later = images.rename(self._folder / "later")
        images.mkdir()
        label = min(later.iterdir())
        last = label.rename(self._folder / "last")  # for a second head
        with contextlib.ExitStack() as stack:
            self._enter("start")
            stack.enter_context(self._aggregator())
            self._wait("aggregator", "connected to the broker")
            device = stack.enter_context(self._device(recorded, records="device"))
            self._wait(recorded, "connected to the broker")
            self._enter("other")
            for other in others:
                with self._device(other):
                    self._wait(other, "submission received")
            self._enter("submission")
            later.rename(images)
            self._wait(recorded, "submission received")
            self._enter("training")
            if "head activated" in self._log("aggregator").read_text(encoding="utf-8"):
                raise ProtofleetError(f"the devices took longer than {DEADLINE_S} s to submit")
            device.send_signal(signal.SIGSTOP)
            self._wait("aggregator", "head activated version=1")
            self._enter("head")
            device.send_signal(signal.SIGCONT)
            self._wait("aggregator", "head evaluated")
            self._complete(
                "device", "edge_client.cli", "predict", next(images.rglob("*.png")), state=recorded
            )
            self._enter("other")
            last.rename(images / label.name)
            self._wait("aggregator", "head activated version=2")
            self._enter("command")
            device.send_signal(signal.SIGSTOP)
            self._complete("aggregator", "aggregator.cli", "rollback", state="aggregator")
            self._wait("aggregator", "head activated version=1 reason=")
            self._enter("other")
            device.send_signal(signal.SIGCONT)
        return {way: self._entered(program, phase) for way, (program, phase) in WAYS.items()}

    def _aggregator(self) -> AbstractContextManager[subprocess.Popen[bytes]]:
        arguments = ("run", "--task", self._folder / "task.toml", "--broker", self._broker)
        command = self._command("aggregator.cli", *arguments, state="aggregator")
        return running_program(
            command, log=self._log("aggregator"), environment=self._environment("aggregator")
        )

    def _device(self, name: str, *, records: str = "") -> AbstractContextManager[subprocess.Popen[bytes]]:
        arguments = ("--broker", self._broker, "--device-id", name, "--data", self._folder / "images" / name)
        command = self._command(
            "edge_client.cli", *arguments, "--backbone", BACKBONE, "--rescan-s", 1, state=name
        )
        return running_program(command, log=self._log(name), environment=self._environment(records))

    def _complete(self, records: str, module: str, *arguments: str | Path, state: str) -> None:
        command = self._command(module, *arguments, state=state)
        done = subprocess.run(
            command, env=self._environment(records), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ProtofleetError(f"{' '.join(command)} failed: {done.stderr}")

    def _command(self, module: str, *arguments: str | float | Path, state: str) -> list[str]:
        return [sys.executable, "-m", module, *map(str, arguments), "--state", str(self._folder / state)]

    def _environment(self, records: str) -> dict[str, str]:
        variables = {
            "PYTHONPATH": f"{self._folder}{os.pathsep}{ROOT}",
            FOLDER: str(self._calls),
            PROGRAM: records,
        }
        return {**os.environ, "PROTOFLEET_HTTP": "off", **(variables if records else {})}

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _wait(self, name: str, text: str) -> None:
        wait_for_log(self._log(name), text, timeout_s=TIMEOUT_S)

    def _enter(self, phase: str) -> None:
        """Begin a phase, once all that the last one brought about has happened."""
        if phase != "start":
            time.sleep(SETTLED_S)
        (self._calls / "phase").write_bytes(bytes([PHASES.index(phase)]))

    def _entered(self, program: str, phase: str) -> set[str]:
        lines = (self._calls / program).read_text(encoding="utf-8").splitlines()
        calls = (line.split("\t") for line in lines)
        return {name for number, name in calls if PHASES[int(number)] == phase}
