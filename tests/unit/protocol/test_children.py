"""Child processes: what they say, their ends, and that none outlives its service. All are real processes."""

import errno
import fcntl
import gc
import os
import queue
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest

from protocol import children
from protocol.children import MAX_LINE_BYTES, Child, launch_process
from protocol.errors import StateError

END_S = 60.0

_CONNECT = """
import os, signal, subprocess, sys, time
from protocol.children import connect
pipe = connect(sys.argv[1:])
"""


class Heard:
    """A child that runs a program's text, and what it says."""

    def __init__(self, text: str) -> None:
        Path(os.environ["PYTHONPATH"], "child_of_test.py").write_text(_CONNECT + text)
        self._said: queue.SimpleQueue[bytes | str | int | Exception] = queue.SimpleQueue()
        put = self._said.put
        self.child = Child("child_of_test", on_message=put, on_line=put, on_end=put, on_failure=put)

    def next(self) -> bytes | str | int | Exception:
        return self._said.get(timeout=END_S)

    def rest(self) -> list[bytes | str | int | Exception]:
        """Return all that follows, up to the exit status."""
        said = [self.next()]
        while not isinstance(said[-1], (int, Exception)):
            said.append(self.next())
        return said


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a child import its text."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_messages_go_both_ways_and_the_exit_status_is_last() -> None:
    """SIGTERM, which a service manager sends to all processes, is the service's to answer."""
    heard = Heard("""
os.kill(os.getpid(), signal.SIGTERM)
pipe.send_bytes(pipe.recv_bytes()[::-1])
sys.exit(7)
""")
    heard.child.send(b"abc")
    assert heard.rest() == [b"cba", 7]
    assert not heard.child.is_killed
    heard.child.send(b"to nobody")
    heard.child.kill()


def test_a_child_that_cannot_be_told_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever."""
    heard = Heard("pipe.recv_bytes()")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOBUFS, "No buffer space available")

    monkeypatch.setattr(Connection, "send_bytes", fail)
    heard.child.send(b"begin")
    assert heard.rest() == [-signal.SIGKILL]
    assert heard.child.reason == "cannot send to it: No buffer space available"
    assert not heard.child.is_killed


def test_standard_error_comes_in_lines() -> None:
    """Of any bytes, without end, and also what a child of the child writes."""
    heard = Heard(f"""
write = lambda data: os.write(2, data)
write(b"first\\n\\n  second \\xff\\n")
subprocess.run(["sh", "-c", "echo from a child >&2"])
write(b"x" * {3 * MAX_LINE_BYTES})
write(b"\\nlast")
""")
    *lines, status = heard.rest()
    assert lines[:3] == ["first", r"second \xff", "from a child"]
    assert all(len(each) < 2 * MAX_LINE_BYTES for each in lines if isinstance(each, str))
    assert "".join(map(str, lines[3:])) == "x" * 3 * MAX_LINE_BYTES + "last"
    assert (lines[-1], status) == ("last", 0)


def test_killed_it_ends_with_the_processes_that_it_has_started() -> None:
    """They hold its standard error, whose end comes with that of the last one."""
    heard = Heard("""
subprocess.Popen(["sleep", "1000"])
pipe.send_bytes(b"started")
time.sleep(1000)
""")
    assert heard.next() == b"started"
    heard.child.kill()
    assert heard.rest() == [-signal.SIGKILL]
    assert heard.child.is_killed


@pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd_open of Linux")
def test_its_end_is_heard_although_a_process_that_it_has_forked_continues() -> None:
    """That one holds the pipe and standard error, and ends with it."""
    heard = Heard("""
if not os.fork():
    time.sleep(1000)
pipe.send_bytes(b"forked")
os.kill(os.getpid(), signal.SIGKILL)
""")
    assert heard.rest() == [b"forked", -signal.SIGKILL]
    assert not heard.child.is_killed


def test_a_child_that_has_closed_its_pipe_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be waited for without end, and nothing that it says is heard any more."""
    monkeypatch.setattr(children, "MAX_EXIT_S", 0.1)
    heard = Heard("""
pipe.send_bytes(b"last")
pipe.close()
time.sleep(1000)
""")
    assert heard.rest() == [b"last", -signal.SIGKILL]


def test_a_message_that_is_too_long_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever for the service to read the rest."""
    monkeypatch.setattr(children, "MAX_EXIT_S", 0.1)
    monkeypatch.setattr(children, "MAX_MESSAGE_BYTES", 100)
    heard = Heard("""
pipe.send_bytes(bytes(10**7))
time.sleep(1000)
""")
    assert heard.rest() == [-signal.SIGKILL]


def test_a_child_that_has_ended_leaves_no_descriptor() -> None:
    """Also while something refers to it still: a service starts thousands."""
    gc.collect()  # what other tests have left
    before = len(list(Path("/dev/fd").iterdir()))
    ended = []
    for _ in range(3):
        ended.append(Heard("sys.exit(3)"))
        assert ended[-1].rest() == [3]
    assert len(list(Path("/dev/fd").iterdir())) <= before


@pytest.mark.parametrize("is_forbidden", [False, True])
def test_a_child_runs_where_its_end_has_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, *, is_forbidden: bool
) -> None:
    """Some builds of Python have no pidfd_open, and some kernels and containers forbid it."""

    def forbid(_: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if is_forbidden:
        monkeypatch.setattr(os, "pidfd_open", forbid, raising=False)
    else:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert Heard("pipe.send_bytes(b'said'); sys.exit(3)").rest() == [b"said", 3]


def test_a_child_that_is_aborted_has_a_reason() -> None:
    """Its end is its own."""
    heard = Heard("time.sleep(1000)")
    heard.child.abort("malformed")
    assert heard.rest() == [-signal.SIGKILL]
    assert (heard.child.is_killed, heard.child.reason) == (False, "malformed")


_SERVICE = """
import sys, time
from protocol.children import Child
Child("child_of_test", on_message=lambda _: print("ready", flush=True), on_line=print, on_end=print, on_failure=print)
time.sleep(1000)
"""

_IN_NATIVE_CODE = """
import ctypes, fcntl
held = open({lock!r}, "w")
fcntl.flock(held, fcntl.LOCK_EX)
if os.fork():
    os.read(os.pipe()[0], 1)  # ends with its group
pipe.send_bytes(b"ready")
ctypes.PyDLL(None).pause()  # with the interpreter's lock: no other thread runs
"""


@pytest.mark.skipif(not hasattr(fcntl, "F_SETSIG"), reason="needs F_SETSIG of Linux")
def test_a_child_in_native_code_ends_with_its_service(tmp_path: Path) -> None:
    """With all of its group, at SIGKILL of the service: a lock that they share is free only after the last one."""
    lock = tmp_path / "lock"
    (tmp_path / "child_of_test.py").write_text(_CONNECT + _IN_NATIVE_CODE.format(lock=str(lock)))
    with subprocess.Popen([sys.executable, "-c", _SERVICE], stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == b"ready\n"
        with lock.open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        service.kill()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_a_child_whose_service_has_ended_does_not_begin(tmp_path: Path) -> None:
    """The service may be killed while the interpreter starts."""
    begun = tmp_path / "begun"
    (tmp_path / "child_of_test.py").write_text(_CONNECT + f"open({str(begun)!r}, 'w')")
    here, there = Pipe()
    alive, ended = os.pipe()
    os.close(ended)
    with here, there:
        assert launch_process("child_of_test", there, alive).wait(END_S) != 0
    os.close(alive)
    assert not begun.exists()


@pytest.mark.parametrize(("name", "value"), [("executable", ""), ("frozen", True)])
def test_a_program_that_is_no_python_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    """An embedded interpreter, or a frozen program: it cannot run a module."""
    monkeypatch.setattr(sys, name, value, raising=False)
    before = len(list(Path("/dev/fd").iterdir()))
    with pytest.raises(StateError, match="run this service as a program of its own"):
        Child("unused", on_message=print, on_line=print, on_end=print, on_failure=print)
    assert len(list(Path("/dev/fd").iterdir())) <= before


def test_a_child_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> children.Process:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(children, "launch", fail)
    with pytest.raises(StateError, match="cannot start a child process: Resource temporarily unavailable"):
        Child("unused", on_message=print, on_line=print, on_end=print, on_failure=print)
