"""Starts programs as forks of one process that has imported all their modules, which takes a tenth of the time.

`python -m tests.support.fleets.fork_server` reads requests from stdin, one JSON line each, and writes the process id
of each program, and later its exit status, to stdout. A program waits for SIGCONT before it begins.
"""

import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import queue
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

from edge_client.graphs import watchdog
from protocol import children

_FORKS = """
import json, os, sys
for request in sys.stdin:
    arguments, folder, environment, output = json.loads(request)
    child = os.fork()
    if child == 0:
        for number, name in enumerate((os.devnull, *output)):
            os.dup2(os.open(name, os.O_RDWR), number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["command", *arguments]
        main()
        sys.exit()
    print(os.waitpid(child, 0)[1], flush=True)
"""


PRELOADED = (
    "aggregator.cli",
    "aggregator.server.aggregator",
    "aggregator.status.collect",
    "aggregator.tasks.task_preparation",
    "aggregator.training.head_job",
    "aggregator.graphs.fused_model",
    "edge_client.cli",
    "edge_client.heads.classifier",
    "edge_client.service.device",
    "edge_client.kinds.builder",
    "edge_client.heads.head_installer",
    "protocol.enrollment",
    "scipy.optimize",
    "onnxruntime",
    "PIL.PngImagePlugin",
)


def run_command(preparation: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `main` with these arguments, which the code of `preparation` has imported."""
    server = _server(preparation)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        output = [Path(folder, name) for name in ("stdout", "stderr")]
        for file in output:
            file.touch()
        request = (arguments, str(Path.cwd()), dict(os.environ), [str(file) for file in output])
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = os.waitstatus_to_exitcode(int(server.stdout.readline()))
        return subprocess.CompletedProcess(arguments, code, *(file.read_text() for file in output))


@functools.cache
def _server(preparation: str) -> subprocess.Popen[str]:
    """Start the process that forks; it ends with this one."""
    return subprocess.Popen(
        [sys.executable, "-c", preparation + _FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


class Program:
    """A forked program with the interface of `subprocess.Popen`; it waits until `resume`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """Exit status, negative for a signal; None while it runs."""
        self.ended = threading.Event()

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; raises `subprocess.TimeoutExpired`."""
        if not self.ended.wait(timeout) or self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal unless the program has ended."""
        with contextlib.suppress(ProcessLookupError):
            if not self.ended.is_set():
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that forks; as a context, it ends with its programs."""

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the process that ends this one
        )
        self._programs: dict[int, Program] = {}
        self._started: queue.SimpleQueue[Program] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_abandoned = False
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def abandon(self) -> None:
        """Kill all programs, and start none any more."""
        with self._lock:
            self._is_abandoned = True
            for program in list(self._programs.values()):
                program.kill()

    def start(self, module: str, *arguments: str | Path, log: Path) -> Program:
        """Fork a program, whose output is appended to `log`, and whose own processes are forked as well."""
        return self._fork(module, arguments, log=log, forks_jobs=True, environment=None)

    def start_process(
        self, module: str, *arguments: str | Path, log: Path, environment: Mapping[str, str]
    ) -> Program:
        """Fork a program with these environment variables, and let it run."""
        program = self._fork(module, arguments, log=log, forks_jobs=False, environment=dict(environment))
        program.resume()
        return program

    def _fork(self, module: str, arguments: Sequence[str | Path], *, log: Path, **request: Any) -> Program:
        """Fork a program; raises RuntimeError if the server is abandoned."""
        request |= {"module": module, "arguments": [str(each) for each in arguments], "log": str(log)}
        with self._lock:
            if self._is_abandoned:
                raise RuntimeError("the run was interrupted")
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return self._started.get(timeout=120)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            pid, status = json.loads(line)
            if status is None:
                self._programs[pid] = Program(pid)
                self._started.put(self._programs[pid])
            else:
                program = self._programs.pop(pid)
                program.returncode = status
                program.ended.set()


class _ForkedSession(children._Session):
    """A child that is forked if it needs the large packages."""

    forked: ClassVar = {"aggregator.server.program"}

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        if args[3] not in self.forked:
            super()._execute_child(args, executable, *rest)  # type: ignore[misc]
            return
        # The arguments that CPython passes on: descriptors for the child, and pipes for the child and for itself.
        read_in, write_in, read_out, write_out, read_err, write_err = rest[8:14]
        self.pid = os.fork()
        if self.pid == 0:
            _run_job(args[args.index("-m") + 1 :], rest[2], read_in, write_out, write_err)
        self._child_created = True
        self._close_pipe_fds(read_in, write_in, read_out, write_out, read_err, write_err)  # type: ignore[attr-defined]


def _run_job(args: list[str], kept: tuple[int, ...], *handles: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number, handle in enumerate(handles):
            if handle != -1:
                os.dup2(handle, number)
        for first, end in itertools.pairwise([2, *sorted(kept), 1024]):
            os.closerange(first + 1, end)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.argv = args
        # Another fork may replace them, which must not close the descriptors.
        sys.stdout, sys.stderr = (os.fdopen(each, "w", closefd=False) for each in (1, 2))
        sys.modules.pop(args[0], None)
        try:
            runpy.run_module(args[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _prepare_child(request: dict[str, Any]) -> None:
    os.setsid()
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        handle = os.open(name, flags, 0o644)
        os.dup2(handle, number)
        os.close(handle)
    os.dup2(1, 2)
    sys.argv = [request["module"], *request["arguments"]]
    if request["environment"] is not None:
        os.environ.clear()
        os.environ.update(request["environment"])
    children._Session = _ForkedSession  # type: ignore[misc]
    if request["forks_jobs"]:
        _ForkedSession.forked |= {"aggregator.training.job_program", "tests.support.fleets.fast_training"}
    # A thread that was made before a fork cannot be started after it.
    watchdog._WATCHDOG = watchdog._Watchdog()
    os.kill(os.getpid(), signal.SIGSTOP)


def _report(pid: int, status: int | None) -> None:
    sys.stdout.write(json.dumps([pid, status]) + "\n")
    sys.stdout.flush()


def _serve() -> dict[str, Any] | None:
    """Fork for each request; returns the request in the child, and None in the server at its end.

    It ends with the process that started it, however that ends, and kills the programs.
    """
    running: set[int] = set()
    with open(0, "rb", buffering=0, closefd=False) as requests:
        while True:
            if select.select([requests], [], [], 0.02)[0]:
                line = requests.readline()
                if not line:
                    for pid in running:
                        os.kill(pid, signal.SIGKILL)
                    return None
                pid = os.fork()
                if pid == 0:
                    return dict(json.loads(line))
                os.waitpid(pid, os.WUNTRACED)
                running.add(pid)
                _report(pid, None)
            _reap(running)


def _reap(running: set[int]) -> None:
    """Report the programs that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        running.discard(pid)
        _report(pid, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    child = _serve()
    if child is not None:
        _prepare_child(child)
        importlib.import_module(child["module"]).main()
