"""A real fleet on this machine: an aggregator and devices as processes, run by their own command lines."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from protocol.mqtt.session import BrokerAddress

PATIENCE_S = 400.0


def write_digits(folder: Path, *, classes: list[int], start: int = 0, each: int = 20) -> Path:
    """Write real handwritten digits as PNG files, one sub-folder a class; returns the folder."""
    digits = load_digits()
    for label in classes:
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        for number in np.flatnonzero(digits.target == label)[start : start + each]:
            image = Image.fromarray((digits.images[number] * 15.9).astype(np.uint8))
            image.save(folder / str(label) / f"{number}.png")
    return folder


@dataclass
class Fleet:
    """The processes of one test, each with its output in a file."""

    root: Path
    broker: BrokerAddress
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, name: str, *arguments: str | Path, file_kb: int | None = None) -> subprocess.Popen[bytes]:
        """Start a module's command line; what it says goes to NAME.log.

        With `file_kb`, no file may grow larger: writes past it fail, as on a full disk.
        """
        log = (self.root / f"{name}.log").open("ab")
        limit = [] if file_kb is None else ["sh", "-c", f'ulimit -f {2 * file_kb}; exec "$@"', "sh"]
        process = subprocess.Popen(
            [*limit, sys.executable, "-m", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        self.processes.append(process)
        return process

    def aggregator(self, task: Path) -> subprocess.Popen[bytes]:
        """Start the aggregator on the test's broker."""
        state = self.root / "aggregator"
        arguments = ("run", "--task", task, "--state", state, "--broker", str(self.broker))
        return self.start("aggregator", "aggregator.cli", *arguments)

    def device(
        self,
        name: str,
        data: Path,
        *more: str,
        file_kb: int | None = None,
        program: str = "edge_client.cli",
    ) -> subprocess.Popen[bytes]:
        """Start a device."""
        arguments = ("--broker", str(self.broker), "--device-id", name, "--data", data, "--threads", "1")
        state = self.root / "devices" / name
        return self.start(name, program, *arguments, "--state", state, *more, file_kb=file_kb)

    def status(self) -> dict[str, Any]:
        """What `aggregator status --json` says."""
        command = [sys.executable, "-m", "aggregator.cli", "status", "--json"]
        done = subprocess.run(
            [*command, "--state", str(self.root / "aggregator")], capture_output=True, text=True, check=False
        )
        summary: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        return summary

    def wait_for(self, what: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the status satisfies something; fails with everybody's output."""
        deadline = time.monotonic() + PATIENCE_S
        summary: dict[str, Any] = {}
        while time.monotonic() < deadline:
            summary = self.status()
            if summary and holds(summary):
                return summary
            time.sleep(0.3)
        raise AssertionError(f"never came: {what}\n{json.dumps(summary, indent=1)}\n{self.logs()}")

    def wait_exit(self, process: subprocess.Popen[bytes], code: int = 0) -> None:
        """Wait for a process to end with a status; fails with everybody's output."""
        try:
            got = process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{process.args!r} did not end\n{self.logs()}") from error
        assert got == code, f"{process.args!r}: exit status {got}\n{self.logs()}"

    def logs(self) -> str:
        """What all processes said."""
        return "\n".join(f"== {file.name}\n{file.read_text()}" for file in sorted(self.root.glob("*.log")))

    def stop(self) -> None:
        """End whatever still runs."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
