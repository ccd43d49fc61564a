"""Real brokers for tests: amqtt in this process, and a mosquitto process."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from aggregator.messaging.embedded_broker import EmbeddedBroker
from protocol.mqtt.session import BrokerAddress

START_TIMEOUT_S = 90.0


def free_address() -> BrokerAddress:
    """An address on this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return BrokerAddress("127.0.0.1", probe.getsockname()[1])


def mosquitto_program() -> str | None:
    """Where mosquitto is; Debian keeps it out of a user's path."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def amqtt(address: BrokerAddress) -> Iterator[None]:
    """Serve with the aggregator's own embedded broker."""
    broker = EmbeddedBroker(address)
    broker.start()
    try:
        yield
    finally:
        broker.stop()


@contextlib.contextmanager
def mosquitto(
    address: BrokerAddress, folder: Path, *, options: str = "allow_anonymous true"
) -> Iterator[None]:
    """Serve with a mosquitto process.

    Args:
        address: where it listens.
        folder: gets its configuration and its log.
        options: lines of its configuration.
    """
    process = start_mosquitto(address, folder, options=options)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def start_mosquitto(address: BrokerAddress, folder: Path, *, options: str) -> subprocess.Popen[bytes]:
    """Start a mosquitto process and wait until it listens; the arguments are those of `mosquitto`."""
    config = folder / f"mosquitto-{address.port}.conf"
    config.write_text(f"listener {address.port} {address.host}\n{options}\n", encoding="utf-8")
    with (folder / f"mosquitto-{address.port}.log").open("ab") as log:
        process = subprocess.Popen(
            [mosquitto_program() or "mosquitto", "-c", str(config)], stdout=log, stderr=log
        )
    _wait_for(address, process)
    return process


def _wait_for(address: BrokerAddress, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((address.host, address.port), timeout=1):
            return
        time.sleep(0.02)
    process.kill()
    raise RuntimeError(f"mosquitto did not start on {address}")
