import socket
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import service_manager
from protocol.service_manager import ServiceManager


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
