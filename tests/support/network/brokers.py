"""Real brokers for tests: amqtt in this process, and a mosquitto process, with certificates."""

import contextlib
import functools
import getpass
import itertools
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Self

import pytest

from aggregator.messaging.embedded_broker import EmbeddedBroker
from aggregator.security.certificate_authority import (
    Issued,
    create_ca,
    issue_client,
    issue_server,
    revocation_list,
    utc_now,
)
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.mqtt.tls import BrokerAccess
from tests.support.programs import find_program

START_TIMEOUT_S = 240.0


def free_address() -> BrokerAddress:
    """Return an unused address on this machine, which no other test gets before its broker starts, or while it is down.

    Its port is below those of outgoing connections: one of these could take it, and a client that reconnects could even
    connect to itself.
    """
    while True:
        port = next(_ports())
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return BrokerAddress("127.0.0.1", port)


@functools.cache
def _ports() -> Iterator[int]:
    """Yield the ports of this process of pytest-xdist again and again, each process's own."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = [*range(10_000 + number, 32_000, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))]
    start = secrets.randbelow(len(ports))
    return itertools.cycle([*ports[start:], *ports[:start]])


def rotated(brokers: tuple[BrokerAddress, ...], start: int) -> str:
    """Return a list of brokers for `--broker` that starts with another one."""
    first = start % len(brokers)
    return ",".join(map(str, brokers[first:] + brokers[:first]))


def mosquitto_program() -> str | None:
    """Return the path of mosquitto; None if it is not installed."""
    return find_program("mosquitto")


MISSING = "mosquitto is not installed: apt-get install mosquitto"
needs_mosquitto = pytest.mark.skipif(mosquitto_program() is None, reason=MISSING)
"""For a test that does much before it makes a `Mosquitto`, which skips it, too."""


@contextlib.contextmanager
def amqtt(address: BrokerAddress) -> Iterator[None]:
    """Serve with the aggregator's own embedded broker."""
    broker = EmbeddedBroker(address, on_failure=lambda _: None)
    broker.start()
    try:
        yield
    finally:
        broker.stop()


class Mosquitto:
    """A mosquitto process that can be killed and started again with the same files; skips where it is not installed.

    Args:
        address: where it listens.
        folder: of its configuration, log and database; `{folder}` in the options is replaced by it.
        options: lines of its configuration.
        access_list: first content of `{folder}/acl`, for options that name that file.
    """

    def __init__(
        self,
        address: BrokerAddress,
        folder: Path,
        *,
        options: str = "allow_anonymous true",
        access_list: str = "",
    ) -> None:
        if (program := mosquitto_program()) is None:
            pytest.skip(MISSING)
        self._program = program
        self.address = address
        self.folder = folder
        self._options = options.replace("{folder}", str(folder))
        if not any(line.startswith("user ") for line in options.splitlines()):
            # Without it, mosquitto drops root's permissions and cannot read its files.
            self._options += f"\nuser {getpass.getuser()}"
        self._process: subprocess.Popen[bytes] | None = None
        if access_list:
            (folder / "acl").write_text(access_list, encoding="utf-8")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def log_file(self) -> Path:
        return self.folder / f"mosquitto-{self.address.port}.log"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def start(self) -> None:
        config = self.folder / f"mosquitto-{self.address.port}.conf"
        config.write_text(
            f"listener {self.address.port} {self.address.host}\n{self._options}\n", encoding="utf-8"
        )
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen([self._program, "-c", str(config)], stdout=log, stderr=log)
        try:
            _wait_for(self.address, self._process)
            for port in re.findall(r"(?m)^listener (\d+) 127\.0\.0\.1$", self._options):
                _wait_for(BrokerAddress("127.0.0.1", int(port)), self._process)
        except BaseException:  # nor does an interrupted test leave it running
            self.kill()
            raise

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self, *, delete_database: bool = False) -> None:
        self._end(signal.SIGKILL)
        if delete_database:
            (self.folder / "mosquitto.db").unlink(missing_ok=True)

    def allow(self, access_list: str) -> None:
        """Replace its access list, which it reads at once."""
        (self.folder / "acl").write_text(access_list, encoding="utf-8")
        self.send_signal(signal.SIGHUP)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal: on SIGHUP it reads its files again, on SIGUSR1 it writes its database."""
        if self._process is not None:
            self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            if (code := self._process.poll()) is not None:
                self._process = None
                raise RuntimeError(
                    f"mosquitto on {self.address} ended by itself with {code}: {self.log()[-2000:]}"
                )
            deadline = time.monotonic() + 120
            while True:
                # mosquitto accepts connections before its main loop, and forgets a SIGTERM that comes in between.
                self._process.send_signal(number)
                try:
                    self._process.wait(timeout=1)
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() > deadline:
                        raise
            self._process = None


def mosquitto(address: BrokerAddress, folder: Path, *, options: str = "allow_anonymous true") -> Mosquitto:
    return Mosquitto(address, folder, options=options)


def _wait_for(address: BrokerAddress, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((address.host, address.port), timeout=1):
            return
        time.sleep(0.02)
    process.kill()
    raise RuntimeError(f"mosquitto did not start on {address}")


HOSTS = ("localhost", "127.0.0.1")


class Certificates:
    """A certificate authority and its certificates, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.authority = create_ca("orchard", now=utc_now() - timedelta(days=365))
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(self.authority.certificate)
        self.revoked = folder / "revoked.crl"
        self.revoke()
        self.broker()

    def broker(self, *hosts: str, ago_days: int = 0) -> None:
        """Issue the broker's certificate, `ago_days` days ago."""
        now = utc_now() - timedelta(days=ago_days)
        self._write("broker", issue_server(self.authority, hosts or HOSTS, now=now, days=100))

    def client(self, name: str, *, ago_days: int = 0) -> Issued:
        """Issue a client's certificate, `ago_days` days ago."""
        now = utc_now() - timedelta(days=ago_days)
        issued = issue_client(self.authority, name, now=now, days=100)
        self._write(name, issued)
        return issued

    def revoke(self, *serials: int) -> None:
        now = utc_now()
        self.revoked.write_bytes(revocation_list(self.authority, dict.fromkeys(serials, now), now=now))

    def access(self, name: str = "") -> BrokerAccess:
        """Return the settings of a client, with the certificate of that name if one is given."""
        if not name:
            return BrokerAccess(tls=True, ca=self.ca)
        return BrokerAccess(
            tls=True, ca=self.ca, certificate=self.folder / f"{name}.crt", key=self.folder / f"{name}.key"
        )

    def mosquitto(self, *, mutual: bool = True) -> str:
        """Return mosquitto's configuration lines; `mutual` requires certificates of clients."""
        lines = [f"certfile {self.folder}/broker.crt", f"keyfile {self.folder}/broker.key"]
        if mutual:
            lines += [
                f"cafile {self.ca}",
                f"crlfile {self.revoked}",
                "require_certificate true",
                "use_identity_as_username true",
                "use_username_as_clientid true",
            ]
        return "\n".join(lines)

    def _write(self, name: str, issued: Issued) -> None:
        (self.folder / f"{name}.crt").write_bytes(issued.certificate)
        (self.folder / f"{name}.key").write_bytes(issued.key)
