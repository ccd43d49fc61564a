"""Parts of all programs: log events, threads, systemd's messages, and telemetry that is off."""

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest

from protocol import service_manager
from protocol.errors import ThreadFailed
from protocol.log import event, notify, observed, warnings_suppressed
from protocol.service_manager import ServiceManager
from protocol.threads import start_thread

log = logging.getLogger("protocol.test_log")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (27, "27"),
        (0.1234567, "0.1235"),
        (1234567.0, "1234567"),
        (2e-9, "2e-09"),
        (3.0, "3"),
        (True, "True"),
        ("press-7", "press-7"),
        ("", '""'),
        ("two words", '"two words"'),
        ('say "x"', '"say \\"x\\""'),
        ("a=b", '"a=b"'),
        ("line\nbreak", '"line\\nbreak"'),
        (b"\x01\xff", "01ff"),
        ("a\udcff.png", r"a\udcff.png"),
        (("a", "b"), "\"('a', 'b')\""),
    ],
)
def test_event_formats_values(value: object, text: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=log.name):
        event(log, logging.INFO, "head installed", value=value)
    assert caplog.messages == [f"head installed value={text}"]


def test_event_keeps_order_and_omits_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=log.name):
        event(log, logging.WARNING, "100 % done", zebra=1, reason=None, apple=2)
    (record,) = caplog.records
    assert record.getMessage() == "100 % done zebra=1 apple=2"
    assert record.levelno == logging.WARNING
    assert record.filename == "test_programs.py", "the record names the caller, not the helper"


def test_warnings_are_suppressed_until_the_block_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Errors are logged; after the block, also one that raises, warnings are reported again."""

    def fail() -> None:
        with warnings_suppressed():
            log.warning("suppressed")
            log.error("logged")
            warnings.warn("suppressed", stacklevel=1)
            raise ValueError("export failed")

    with caplog.at_level(logging.INFO, logger=log.name), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="export failed"):
            fail()
        log.warning("logged after the block")
        warnings.warn("reported after the block", stacklevel=1)
    assert caplog.messages == ["logged", "logged after the block"]
    assert [str(warning.message) for warning in caught] == ["reported after the block"]


def test_observer_gets_notices_of_the_body_and_of_its_threads() -> None:
    """Those of other threads, and those after the body, are not observed."""
    seen: list[object] = []
    with observed(seen.append):
        notify("body")
        start_thread(lambda: notify("thread"), name="inside", on_failure=lambda _: None).join()
        outside = threading.Thread(target=notify, args=["outside"])
        outside.start()
        outside.join()
    notify("after")
    assert seen == ["body", "thread"]


def test_error_is_reported_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the stack trace; SystemExit ends a thread no less than an error."""
    failures: queue.SimpleQueue[ThreadFailed] = queue.SimpleQueue()
    for cause in (ValueError("oops"), SystemExit(3)):

        def run(error: BaseException = cause) -> None:
            raise error

        start_thread(run, name="worker", on_failure=failures.put).join()
        failure = failures.get_nowait()
        assert failure.__cause__ is cause
        assert str(failure) == f"the thread worker has ended unexpectedly: {type(cause).__name__}: {cause}"
    assert "thread ended unexpectedly: worker" in caplog.text
    assert "Traceback" in caplog.text


def test_failure_of_the_system_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A disk or memory that fails is no error of the program: its log has no stack trace."""
    failures: queue.SimpleQueue[ThreadFailed] = queue.SimpleQueue()

    def run() -> None:
        raise OSError(5, "Input/output error", "/state/blobs")

    start_thread(run, name="worker", on_failure=failures.put).join()
    text = "the thread worker has ended unexpectedly: cannot use /state/blobs: Input/output error"
    assert str(failures.get_nowait()) == text
    assert "Traceback" not in caplog.text


def test_thread_that_cannot_be_started_is_an_error() -> None:
    said = "cannot start the thread worker: can't start new thread: raise"
    no_thread = patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with no_thread, pytest.raises(ThreadFailed, match=said):
        start_thread(lambda: None, name="worker", on_failure=lambda _: None)


@pytest.mark.parametrize("is_abstract", [False, True])
def test_states_reach_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_abstract: bool) -> None:
    monkeypatch.setattr(service_manager, "INTERVAL_S", 1000.0)
    name = f"{'@' if is_abstract else ''}{tmp_path}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name.replace("@", "\0"))
        receiver.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        manager = ServiceManager()
        manager.ready()
        manager.alive()
        manager.alive()
        assert [receiver.recv(100), receiver.recv(100)] == [b"READY=1", b"WATCHDOG=1"]
        receiver.setblocking(False)
        with pytest.raises(BlockingIOError):
            receiver.recv(100)


def test_nothing_is_sent_without_systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    ServiceManager().ready()
    monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/missing")
    ServiceManager().ready()


def test_signal_whose_exception_is_ignored_ends_the_main_loop() -> None:
    """Python ignores exceptions in a finalizer, also that of a signal's handler."""
    program = """
import os, signal
from protocol.service_manager import ServiceManager, stop_on_terminate

class Terminated:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

stop_on_terminate()
Terminated()
print("goes on", flush=True)
ServiceManager().alive()
print("hangs", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "goes on\n")


@pytest.mark.parametrize("program", ["aggregator.cli", "edge_client.cli", "sums_operator.cli"])
def test_process_1_ends_on_a_signal_during_its_imports(program: str) -> None:
    """Linux would ignore it; any other process is ended by the signal itself."""
    text = """
import importlib, os, signal, sys
os.getpid = lambda: int(sys.argv[1])

class Importing:
    @staticmethod
    def find_spec(name, *_):
        if name == "click":
            signal.raise_signal(signal.SIGTERM)

sys.meta_path.insert(0, Importing)
importlib.import_module(sys.argv[2])
"""
    codes = [
        subprocess.run([sys.executable, "-c", text, pid, program], check=False).returncode for pid in "12"
    ]
    assert codes == [128 + signal.SIGTERM, -signal.SIGTERM]


ROOT = Path(__file__).parents[3]


def run(program: str, home: Path, **variables: str) -> str:
    """Return the output of a program, started without the variables of CI services, which turn telemetry off too."""
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-B", "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("package", ["edge_client", "aggregator", "export"])
def test_onnx_runtime_stores_no_telemetry(package: str, tmp_path: Path) -> None:
    """With telemetry, its import writes an identifier of the device and unsent events to the home folder."""
    run(f"import {package}, onnxruntime; onnxruntime.SessionOptions()", tmp_path)
    assert [str(file) for file in tmp_path.rglob("*")] == []


def test_a_user_can_enable_telemetry(tmp_path: Path) -> None:
    program = "import protocol, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    assert run(program, tmp_path) == "1"
    assert run(program, tmp_path, ORT_DISABLE_TELEMETRY="0") == "0"
