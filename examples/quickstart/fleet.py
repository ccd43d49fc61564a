"""The demo's processes, each run by its own command line: an aggregator with its broker, and the devices."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from examples.quickstart.folder import FLEET, Folder
from protocol.errors import ProtofleetError

POLL_S = 0.4
STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Usage:
    """Costs of a process that has ended: seconds of CPU time, and its peak of resident memory in bytes."""

    cpu_s: float
    peak_memory_bytes: int
    """0 where there is no /proc."""


class Fleet:
    """A fleet on this machine; `timeout_s` limits its work in all. Leaving the context stops every process."""

    def __init__(self, folder: Folder, *, timeout_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._broker = f"127.0.0.1:{free_port()}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._cpu_s: dict[str, float] = {}
        self._peak_memory_bytes: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def broker(self) -> str:
        """Address of the broker, HOST:PORT."""
        return self._broker

    def start_aggregator(self) -> None:
        """Start the aggregator and wait until its broker listens.

        Raises:
            ProtofleetError: it ended, or took too long.
        """
        self._start(
            "aggregator",
            *("aggregator.cli", "run", "--embedded-broker", "--broker", self._broker),
            *("--task", self._folder.task, "--state", self._folder.aggregator),
        )
        while not _listens(self._broker):
            self._poll()
            time.sleep(POLL_S / 4)

    def start_devices(self, names: Iterable[str]) -> None:
        """Start a device program for each name."""
        for name in names:
            self._start(
                name,
                *(
                    "edge_client.cli",
                    "--broker",
                    self._broker,
                    "--fleet",
                    FLEET,
                    "--device-id",
                    name,
                    "--once",
                ),
                *("--data", self._folder.images(name), "--state", self._folder.state(name)),
                *("--threads", "1"),
            )

    def wait_for_devices(self, on_poll: Callable[[], None]) -> None:
        """Wait until every device has ended without an error; `on_poll` is called several times a second.

        Raises:
            ProtofleetError: one failed, or it took too long.
        """
        while self._poll():
            on_poll()
            time.sleep(POLL_S)
        on_poll()

    def usage(self, name: str) -> Usage:
        """Return what the process of a device that has ended used."""
        return Usage(self._cpu_s[name], self._peak_memory_bytes[name])

    def stop(self) -> None:
        """End every process that still runs."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str, *arguments: str | Path) -> None:
        with (self._folder.logs / f"{name}.log").open("wb") as log, _uninterrupted():
            # In a session of its own, so that Ctrl-C reaches the demo alone, which then ends it.
            self._processes[name] = subprocess.Popen(
                _python(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _poll(self) -> int:
        """Return how many devices are running."""
        codes = {name: self._exit_code(name, process) for name, process in self._processes.items()}
        for name, code in codes.items():
            if code or (name == "aggregator" and code is not None):
                raise ProtofleetError(f"{name} ended with exit status {code}: {self._last_line(name)}")
        if time.monotonic() > self._deadline_s:
            late = ", ".join(name for name, code in codes.items() if code is None)
            raise ProtofleetError(
                f"not done after {self._timeout_s:.0f} s, still running: {late}; logs in {self._folder.logs}"
            )
        return sum(code is None for name, code in codes.items() if name != "aggregator")

    def _exit_code(self, name: str, process: subprocess.Popen[bytes]) -> int | None:
        """Return the exit status of a process, None while it runs, and record what it uses."""
        if process.returncode is None:
            peaks = (peak_memory_bytes(pid) for pid in (process.pid, *children(process.pid)))
            self._peak_memory_bytes[name] = max(sum(peaks), self._peak_memory_bytes.get(name, 0))
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
            if ended:
                process.returncode = os.waitstatus_to_exitcode(status)
                self._cpu_s[name] = used.ru_utime + used.ru_stime
        return process.returncode

    def _last_line(self, name: str) -> str:
        log = self._folder.logs / f"{name}.log"
        text = log.read_text(encoding="utf-8", errors="replace").strip()
        return f"{text.splitlines()[-1]} (see {log})" if text else f"it logged nothing in {log}"


def peak_memory_bytes(pid: int) -> int:
    """Return the peak of resident memory of a running process; 0 where there is no /proc, or if it has ended.

    The `ru_maxrss` of `os.wait4` would be at least the peak of the demo's own process, which Linux counts as the
    child's from the fork to the exec.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peaks[0]) * 1024 if peaks else 0


def children(pid: int) -> list[int]:
    """Return the processes that a process, or one of these, has started; none where there is no /proc."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    with contextlib.suppress(OSError):
        found = [int(child) for file in files for child in file.read_text().split()]
        return [each for child in found for each in (child, *children(child))]
    return []


def free_port() -> int:
    """Return a port of this machine on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM, so that every started process is recorded."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt


def _listens(broker: str) -> bool:
    host, _, port = broker.rpartition(":")
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, int(port))) == 0


def _python(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", *map(str, arguments)]
