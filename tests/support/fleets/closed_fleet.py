"""A closed fleet: its broker has the configuration that `aggregator enroll-broker` writes."""

import re
import signal
from dataclasses import replace
from pathlib import Path

from aggregator.security.enrollment import enroll, enroll_broker
from aggregator.security.identity import aggregator_access
from aggregator.security.mosquitto_config import FOLDER, LOG
from aggregator.storage.store import Store
from protocol.enrollment import read_enrollment
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.mqtt.tls import BrokerAccess
from tests.support.network.brokers import Mosquitto

FLEET = "orchard"


class ClosedFleet:
    """A fleet's state, its enrollment folders and its broker.

    Args:
        root: their folder.
        address: where the broker listens.
        open_address: a second listener, without certificates and access list.
    """

    def __init__(
        self, root: Path, address: BrokerAddress, *, open_address: BrokerAddress | None = None
    ) -> None:
        self.root = root
        self.broker = replace(address, host="localhost")
        self.state = root / "aggregator"
        self.store = Store(self.state)
        self._open_address = open_address
        enroll_broker(self.store, ["broker.example"], fleet=FLEET, out=root / "broker", days=30)

    def enroll(self, device: str, *, renew: bool = False, folder: str = "") -> Path:
        """Enroll a device; returns its folder."""
        out = self.root / (folder or device)
        enroll(self.store, device, broker=str(self.broker), renew=renew, fleet=FLEET, out=out)
        return out

    def access(self, device: str) -> BrokerAccess:
        return read_enrollment(self.root / device).access

    def aggregator_access(self) -> BrokerAccess:
        return aggregator_access(self.state, BrokerAccess(tls=True), fleet=FLEET)

    def configuration(self) -> str:
        return (self.root / "broker" / "mosquitto.conf").read_text(encoding="utf-8")

    def mosquitto(self, configuration: str = "") -> Mosquitto:
        """Return the broker, by default with the written configuration; its paths lead to this folder."""
        text = configuration or self.configuration()
        for there, here in (
            (FOLDER, f"{self.root}/broker"),
            ("/var/lib/mosquitto/", f"{self.root}/"),
            (f"file {LOG}", "stderr"),
        ):
            text = text.replace(there, here)
        if self._open_address is None:
            text = re.sub(r"(?m)^listener .*$", "", text)
            return Mosquitto(BrokerAddress("127.0.0.1", self.broker.port), self.root, options=text)
        text = re.sub(r"(?m)^listener .*$", f"listener {self.broker.port} 127.0.0.1", text)
        options = f"per_listener_settings true\nallow_anonymous true\n{text}"
        return Mosquitto(self._open_address, self.root, options=options)

    def publish_revocations(self, broker: Mosquitto | None = None) -> None:
        """Copy the revocation list to the broker, and let it read it if it runs."""
        revoked = (self.state / "identity" / "revoked.crl").read_bytes()
        (self.root / "broker" / "revoked.crl").write_bytes(revoked)
        if broker is not None:
            broker.send_signal(signal.SIGHUP)
