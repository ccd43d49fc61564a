"""Short lives of the programs, each with a fault, a restart without it, and the invariant of tests/system/faults."""

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.fleets.fork_server import ForkServer, Program
from tests.system.injection.strace import (
    JOBS,
    KILLED_IN_JOB,
    Injection,
    Strace,
    calls_below,
    injected,
    stopped,
    trace_files,
    write_tracing_interpreter,
)

LIMIT_S = 150.0
"""A program that neither ends nor completes its life by then hangs; longer than any retry delay in one."""

LASTING_S = 4.0
"""How long a full disk lasts, if the program does not end before."""

RECURRING_S = 40.0
"""How long other faults may recur: each training is a process with calls of its own, and all would fail alike."""

OLD_S = 7200.0
"""Age given to temporary files of a killed program: younger ones may belong to a running one."""

JOB_END_S = 120.0
"""A job has ended this long after its service."""

DIGEST_LETTERS = 64

TRACES = (
    "Traceback (most recent call last)",
    "--- Logging error ---",
    "Exception ignored in",
    "terminate called",
)

HANGING_THREAD = "Exception ignored in thread started by"
"""Logged by Python as a thread begins without memory: the one that starts it then waits for ever (CPython 140746)."""


@dataclass
class Outcome:
    """The result of one life.

    Attributes:
        injected: faults in calls on its files, or in mmap.
        elsewhere: faults in other calls, whose log is not judged.
        ended: the program ended because of the fault.
        sent: devices that have submitted.
        violations: what contradicts the invariant.
    """

    injected: int = 0
    elsewhere: int = 0
    ended: bool = False
    sent: int = 0
    violations: list[str] = field(default_factory=list)


@dataclass
class Life:
    """One run of one program in a folder of its own.

    Attributes:
        folder: contains its files and nothing else that the program uses.
        trace: strace's log; of all calls if nothing is injected.
    """

    server: ForkServer
    program: str
    folder: Path
    injection: Injection | None
    outcome: Outcome = field(default_factory=Outcome)
    _tracers: list[Strace] = field(default_factory=list)

    @property
    def trace(self) -> Path:
        return self.folder.with_suffix(".strace")

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def check(self, holds: bool, problem: str) -> None:  # noqa: FBT001 - an assertion that is collected
        if not holds:
            self.fail(problem)

    def fail(self, problem: str) -> None:
        self.outcome.violations.append(problem)

    def start(self, module: str, *arguments: str | Path) -> Program:
        """Start the program with the fault."""
        program = self.server.start(module, *arguments, log=self.log)
        self._tracers.append(trace_files(program.pid, self.trace, self.injection))
        program.resume()
        return program

    def start_tracing_jobs(self, *arguments: str | Path) -> Program:
        """Start `edge-client` with the fault in its first job."""
        interpreter = self.folder.with_suffix(".python")
        write_tracing_interpreter(interpreter, self.trace, self.injection)
        return self.restart("tests.support.fleets.traced_jobs", interpreter, *arguments)

    def restart(self, module: str, *arguments: str | Path) -> Program:
        """Start the program without a fault."""
        program = self.server.start(module, *arguments, log=self.log)
        program.resume()
        return program

    def detach(self) -> None:
        """End the injection, and count its faults."""
        while self._tracers:
            self._tracers.pop().detach()
            self.count_faults()

    def count_faults(self) -> None:
        """Note the faults in the log of strace."""
        if self.injection and self.trace.exists():
            self.outcome.injected, self.outcome.elsewhere = injected(self.trace, self.folder)

    def wait(self, program: Program, done: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the end of the program or of its life; returns False if it hangs, and kills it."""
        deadline_s = time.monotonic() + LIMIT_S
        is_lasting = self.injection is not None and self.injection.lasts
        lasts_until_s = time.monotonic() + (LASTING_S if is_lasting else RECURRING_S)
        while program.returncode is None and not done():
            if time.monotonic() > deadline_s:
                self.fail(f"neither ended nor complete within {LIMIT_S:.0f} s")
                program.kill()
                program.ended.wait(120)
                return False
            if self._tracers and self.hangs_in_python():
                program.kill()
                program.ended.wait(120)
            if self.injection and (time.monotonic() > lasts_until_s or self._has_ended_a_job()):
                self.detach()
            program.ended.wait(0.05)
        return True

    def _has_ended_a_job(self) -> bool:
        """Return whether a fault may have ended a device's job: it refuses a task of which the next two end as well."""
        if self.program != "edge-client" or self.injection is None:
            return False
        if self.injection.fault not in {"SIGKILL", "ENOMEM"}:
            return False
        self.count_faults()
        return self.outcome.injected + self.outcome.elsewhere > 0

    def run(self, *arguments: str, before_restart: Callable[[], object]) -> None:
        """Run the program with the fault and, if it fails, without."""
        if self.program == KILLED_IN_JOB:
            self._run_killed_in_job(*arguments, before_restart=before_restart)
            return
        program = self.start_tracing_jobs(*arguments[1:]) if self.program == JOBS else self.start(*arguments)
        self.wait(program)
        self.detach()
        self.count_faults()
        self.judge_end(program.returncode)
        if program.returncode != 0:
            before_restart()
            again = self.restart(*arguments)
            self.wait(again)
            self.check(again.returncode == 0, f"exit status {again.returncode} after the restart")

    def _run_killed_in_job(self, *arguments: str, before_restart: Callable[[], object]) -> None:
        """Kill the service while its job is stopped, and start another one at once; the job ends with its service."""
        program = self.start_tracing_jobs(*arguments[1:])
        self.wait(program, lambda: bool(stopped(self.trace)))
        processes = stopped(self.trace)
        self.count_faults()
        if processes:
            program.kill()
            before_restart()
            again = self.restart(*arguments)
            self.wait(again)
            self.check(again.returncode == 0, f"exit status {again.returncode} after the restart")
            self.check(not _left(processes), "the job did not end with its service")
        else:
            self.judge_end(program.returncode)

    def judge_end(self, status: int | None) -> None:
        """Check the exit status and the log of the program that had the fault."""
        is_killed = self.hangs_in_python() or (self.injection and self.injection.fault == "SIGKILL")
        killed = [-signal.SIGKILL] if is_killed else []
        self.outcome.ended = status not in {None, 0}
        self.check(status in {None, 0, 1, *killed}, f"exit status {status}")
        if self.outcome.elsewhere or self.hangs_in_python():
            return
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        if self.injection and self.injection.fault == "ENOMEM":  # libraries of a job print them
            text = "\n".join(line for line in text.splitlines() if "message of a library" not in line)
        for trace in TRACES:
            self.check(trace not in text, f"{trace!r} in the log: {text.strip().splitlines()[-1:]}")
        if status == 1:
            last = text.strip().splitlines()[-1:]
            self.check(last != [] and last[0].startswith("error: "), f"no error message: {last}")

    def hangs_in_python(self) -> bool:
        """Return whether a thread has ended without memory before it began."""
        if self.injection is None or self.injection.fault != "ENOMEM" or not self.log.exists():
            return False
        return HANGING_THREAD in self.log.read_text(errors="replace")

    def logged(self, text: str) -> int:
        """Return how often the program and its restarts have logged a text."""
        return self.log.read_text(errors="replace").count(text)

    def age_temporary_files(self) -> None:
        """Make the temporary files of a killed program older than any write takes."""
        then_s = time.time() - OLD_S
        for file in self.folder.rglob(".*"):
            with contextlib.suppress(OSError):
                os.utime(file, (then_s, then_s))

    def delete(self) -> None:
        """Delete all files of this life."""
        for path in self.folder.parent.glob(f"{self.folder.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def calls(self) -> dict[str, list[int]]:
        """Return the numbers of the calls on its files, of a life without a fault."""
        return calls_below(self.trace, self.folder)


def names_of(folder: Path) -> set[str]:
    """Return the files below a folder, with one name for all blobs of a kind, and for all trainings of a head."""
    names = set()
    for file in folder.rglob("*"):
        if file.is_file():
            relative = file.relative_to(folder)
            is_digest = len(file.name) == DIGEST_LETTERS
            name = str(relative.parent / "DIGEST" if is_digest else relative)
            names.add(re.sub(r"(training/head-\d+)-\d+-\w+", r"\1", name))
    return names


def leftovers(folder: Path, expected: set[str]) -> list[str]:
    """Return files that an undisturbed life does not leave.

    SQLite's logs, damaged files moved aside, and the folder of a job, which the next start deletes, do not count.
    """
    known = re.compile(r".*(-wal|-shm|\.damaged)|damaged/.*|jobs/\d+/.*")
    return sorted(name for name in names_of(folder) - expected if not known.fullmatch(name))


def _left(processes: set[int]) -> bool:
    """Return whether a process does not end, not even once it continues: a new one learns it when it connects."""
    for process in filter(_runs, processes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    deadline_s = time.monotonic() + JOB_END_S
    while any(map(_runs, processes)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return any(map(_runs, processes))


def _runs(process: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    return False
