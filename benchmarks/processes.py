"""The project's programs and a broker, as processes of a benchmark."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from protocol.errors import ProtofleetError
from protocol.mqtt.reconnecting_session import BrokerAddress

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 30.0


def free_address() -> BrokerAddress:
    """Return an address of this machine on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return BrokerAddress("127.0.0.1", probe.getsockname()[1])


@contextlib.contextmanager
def running(module: str, *arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module's command line as long as the context lasts; its output goes to a file."""
    with running_program([sys.executable, "-m", module, *arguments], log=log) as process:
        yield process


def serve_of(aggregator: subprocess.Popen[bytes]) -> int:
    """Return the process id of the program `serve` of a running `aggregator run`."""
    programs = psutil.Process(aggregator.pid).children()
    return next(int(each.pid) for each in programs if "aggregator.server.program" in each.cmdline())


@contextlib.contextmanager
def running_program(
    command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program as long as the context lasts; its output goes to a file."""
    variables = {
        "PROTOFLEET_HTTP": "off",
        **(environment or os.environ),
    }  # no dashboard beside what is measured
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_log(log: Path, text: str, *, timeout_s: float) -> None:
    """Wait until a program has written a text to its log; raises ProtofleetError if it does not."""
    deadline = time.monotonic() + timeout_s
    while text not in log.read_text(errors="replace"):
        if time.monotonic() > deadline:
            raise ProtofleetError(f"{text!r} is not in {log}: {log.read_text(errors='replace')[-500:]}")
        time.sleep(0.05)


@contextlib.contextmanager
def mosquitto(folder: Path) -> Iterator[BrokerAddress]:
    """Run mosquitto with the configuration in `deploy/mosquitto.conf`.

    Raises:
        ProtofleetError: it is not installed, or does not start.
    """
    address = free_address()
    with running_mosquitto(folder, address):
        yield address


@contextlib.contextmanager
def running_mosquitto(folder: Path, address: BrokerAddress) -> Iterator[subprocess.Popen[bytes]]:
    """Run mosquitto like `mosquitto`, on an address; what it retains in the folder outlives it."""
    program = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        raise ProtofleetError("mosquitto is not installed: apt-get install mosquitto")
    text = (ROOT / "deploy" / "mosquitto.conf").read_text()
    text = text.replace("listener 1883", f"listener {address.port} 127.0.0.1")
    config = folder / "mosquitto.conf"
    config.write_text(text.replace("/var/lib/mosquitto/", f"{folder}/"))
    folder.chmod(0o777)  # mosquitto may give up root's rights
    process = subprocess.Popen([program, "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not _listens(address):
            if time.monotonic() > deadline_s:
                raise ProtofleetError(f"mosquitto did not start on {address} within {START_TIMEOUT_S:.0f} s")
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait()


def _listens(address: BrokerAddress) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address.host, address.port)) == 0
