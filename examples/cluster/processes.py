"""Programs of the example, each in a session of its own, with a log file; they can be killed and started again."""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from protocol.errors import ProtofleetError

State = Literal["starting", "running", "paused", "killed"]

POLL_S = 0.05
STOP_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to start.

    Attributes:
        name: of its log file, and in the display.
        role: group in the display; empty hides it.
        command: its command line.
        environment: variables beside those of this process.
        user: whom it runs as, if not as this process.
        ready: regular expression for its output once it can be used.
        is_ready: returns True once it can be used.
    """

    name: str
    role: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    ready: str = ""
    is_ready: Callable[[], bool] = lambda: True


class Processes:
    """The programs that were started; leaving the context kills what still runs.

    Args:
        logs: folder of a log file for each program.
        deadline_s: time of the monotonic clock at which waiting fails.
    """

    def __init__(self, logs: Path, *, deadline_s: float) -> None:
        self.programs: dict[str, Program] = {}
        self.states: dict[str, State] = {}
        self.kills: dict[str, int] = {}
        self._logs = logs
        self._offsets: dict[str, int] = {}
        self._is_interrupted = False
        self._handlers: dict[signal.Signals, Any] = {}
        self._deadline_s = deadline_s
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        # An interrupt is noticed by `update`, so that each process that was started is known and ended.
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._interrupt)
        return self

    def _interrupt(self, *_: object) -> None:
        self._is_interrupted = True

    def __exit__(self, *_: object) -> None:
        self.stop(*self._running)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self, program: Program) -> subprocess.Popen[bytes]:
        """Start a program, again if it was killed; its log file is continued."""
        file = self.log_file(program.name)
        self._offsets[program.name] = file.stat().st_size if file.exists() else 0
        try:
            with file.open("ab") as log:
                process = subprocess.Popen(
                    program.command,
                    cwd="/" if program.user else None,
                    env={**os.environ, **program.environment},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    user=program.user,
                    group=program.user,
                    extra_groups=[] if program.user else None,
                )
        except OSError as error:
            raise ProtofleetError(f"cannot start {program.name}: {error}") from error
        self._running[program.name] = process
        self.programs[program.name] = program
        self.states[program.name] = "starting"
        return process

    def restart(self, name: str) -> None:
        """Start a killed program again."""
        self.start(self.programs[name])

    def kill(self, name: str) -> None:
        """End a program and its own processes by SIGKILL."""
        process = self._running[name]
        for pid in (process.pid, *_children(process.pid)):
            _signal_group(pid, signal.SIGKILL)
        process.wait()
        self.states[name] = "killed"
        self.kills[name] = self.kills.get(name, 0) + 1

    def pause(self, name: str) -> None:
        """Stop a program by SIGSTOP, as a machine that hangs."""
        _signal_group(self._running[name].pid, signal.SIGSTOP)
        self.states[name] = "paused"
        self.kills[name] = self.kills.get(name, 0) + 1

    def resume(self, name: str) -> None:
        """Let a paused program go on."""
        self.states[name] = "running"
        _signal_group(self._running[name].pid, signal.SIGCONT)

    def stop(self, *names: str) -> None:
        """End programs by SIGTERM, and by SIGKILL those that take longer than 20 seconds."""
        running = [name for name in names if self._running[name].poll() is None]
        for name in running:
            for number in (signal.SIGTERM, signal.SIGCONT):
                _signal_group(self._running[name].pid, number)
        until_s = time.monotonic() + STOP_S
        for name in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running[name].wait(max(0.0, until_s - time.monotonic()))
            self.kill(name)
        for name in names:
            del self._running[name], self.programs[name], self.states[name]

    def update(self) -> None:
        """Find the programs that have become ready.

        Raises:
            ProtofleetError: one has ended by itself, or the time is over.
            KeyboardInterrupt: Ctrl-C or SIGTERM.
        """
        if self._is_interrupted:
            raise KeyboardInterrupt
        for name, state in self.states.items():
            code = self._running[name].poll()
            if code is not None and state != "killed":
                raise ProtofleetError(f"{name} ended with exit status {code}: {self._last_line(name)}")
            program = self.programs[name]
            if state == "starting" and re.search(program.ready, self.log(name)) and program.is_ready():
                self.states[name] = "running"
        if time.monotonic() > self._deadline_s:
            raise ProtofleetError(f"the time is over (--timeout-s); logs in {self._logs}")

    def wait_until(self, holds: Callable[[], bool], on_poll: Callable[[], None] = lambda: None) -> None:
        """Wait for a condition; `on_poll` is called at each check.

        Raises:
            ProtofleetError: a program has ended by itself, or the time is over.
            KeyboardInterrupt: Ctrl-C or SIGTERM.
        """
        while not holds():
            self.update()
            on_poll()
            time.sleep(POLL_S)

    def log_file(self, name: str) -> Path:
        """Return the file with the output of a program."""
        return self._logs / f"{name}.log"

    def log(self, name: str, *, whole: bool = False) -> str:
        """Return the output of a program since its last start, or `whole` of all starts."""
        return (
            self.log_file(name).read_bytes()[0 if whole else self._offsets[name] :].decode(errors="replace")
        )

    def _last_line(self, name: str) -> str:
        lines = self.log(name).strip().splitlines()
        return (
            f"{lines[-1]} (see {self.log_file(name)})"
            if lines
            else f"it logged nothing in {self.log_file(name)}"
        )


def _signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to the process group of a process, or to the process if it leads none."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            send(pid, number)
            return


def _children(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    try:
        found = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*found, *(below for each in found for below in _children(each))]


def free_port() -> int:
    """Return a port on which nothing listens now.

    It is below those of outgoing connections: one of these could take it while its program is down.
    """
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def listens(port: int) -> bool:
    """Return True if something listens on a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
