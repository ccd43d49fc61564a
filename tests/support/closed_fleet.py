"""A closed fleet on this machine: its broker with the configuration that `aggregator enroll-broker` writes."""

import getpass
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from aggregator.security.enrollment import Wanted, enrol, enrol_broker
from aggregator.security.identity import own_access
from aggregator.security.mosquitto_config import FOLDER, LOG
from aggregator.storage.store import Store
from protocol.enrollment import read_enrollment
from protocol.mqtt.session import BrokerAddress
from protocol.mqtt.tls import BrokerAccess
from tests.support.brokers import mosquitto

FLEET = "orchard"


class Closed:
    """A fleet's state, and the folders that were made of it."""

    def __init__(self, root: Path, address: BrokerAddress) -> None:
        self.root = root
        self.broker = replace(address, host="localhost")
        self.state = root / "aggregator"
        self.store = Store(self.state)
        enrol_broker(self.store, ["broker.example"], fleet=FLEET, out=root / "broker", days=30)

    def enrol(self, device: str, *, renew: bool = False, folder: str = "") -> Path:
        """Let a device in; returns its folder."""
        out = self.root / (folder or device)
        enrol(self.store, Wanted(device, str(self.broker), renew=renew), fleet=FLEET, out=out)
        return out

    def access(self, device: str) -> BrokerAccess:
        """How a device connects."""
        return read_enrollment(self.root / device).access

    def aggregators_access(self) -> BrokerAccess:
        """How the aggregator does."""
        return own_access(self.state, BrokerAccess(tls=True), fleet=FLEET)

    @contextmanager
    def serving(self, configuration: str = "") -> Iterator[None]:
        """Run the broker as it is told to; what has a place on a real machine has another one here."""
        text = configuration or (self.root / "broker" / "mosquitto.conf").read_text(encoding="utf-8")
        text = re.sub(r"(?m)^listener .*$", "", text).replace(FOLDER, str(self.root / "broker"))
        text = text.replace("/var/lib/mosquitto/", f"{self.root}/").replace(f"file {LOG}", "stderr")
        options = f"{text}\nuser {getpass.getuser()}\npid_file {self.root}/mosquitto.pid"
        with mosquitto(BrokerAddress("127.0.0.1", self.broker.port), self.root, options=options):
            yield

    def hand_over(self) -> None:
        """Give the broker the list of the revoked that the aggregator has written."""
        (self.root / "broker" / "revoked.crl").write_bytes(
            (self.state / "identity" / "revoked.crl").read_bytes()
        )

    def reload(self) -> None:
        """Have the broker read it while it runs."""
        os.kill(int((self.root / "mosquitto.pid").read_text()), signal.SIGHUP)
