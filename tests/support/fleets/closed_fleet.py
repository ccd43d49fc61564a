"""A closed fleet: its broker has the configuration that `aggregator enroll-broker` writes."""

import json
import re
import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

from aggregator.commands.session import open_session
from aggregator.messaging.manifest_signer import identity_of
from aggregator.security.enrollment import enroll, enroll_broker, revoke
from aggregator.security.identity import aggregator_access
from aggregator.security.mosquitto_config import FOLDER, LOG
from aggregator.storage.open_store import open_store
from protocol.enrollment import read_enrollment
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Drained, Outgoing
from protocol.mqtt.tls import BrokerAccess
from protocol.wire.codec import encode
from protocol.wire.topics import fleet_topic
from tests.support.devices.device_factory import make_manifest
from tests.support.messages.manifests import signed_manifest
from tests.support.network.brokers import Mosquitto
from tests.support.network.sessions import running

FLEET = "orchard"

_OF_A_LISTENER = {
    *("listener", "cafile", "certfile", "keyfile", "crlfile", "allow_anonymous", "require_certificate"),
    *("use_identity_as_username", "use_username_as_clientid", "acl_file"),
}
"""Settings that mosquitto has for each listener."""


def with_paths_of(root: Path, configuration: str) -> str:
    """Return a broker's configuration whose files are below a folder, and whose log is its output."""
    for there, here in (
        (FOLDER, f"{root}/broker"),
        ("/var/lib/mosquitto/", f"{root}/"),
        (f"file {LOG}", "stderr"),
    ):
        configuration = configuration.replace(there, here)
    return configuration


class ClosedFleet:
    """A fleet's state, its enrollment folders and its broker.

    Args:
        root: their folder.
        address: where the broker listens.
        open_address: a second listener, without certificates and access list.
        fleet: its name.
        database: URL of its tables; by default they are in its state directory.
    """

    def __init__(
        self,
        root: Path,
        address: BrokerAddress,
        *,
        open_address: BrokerAddress | None = None,
        fleet: str = FLEET,
        database: str = "",
    ) -> None:
        self.root = root
        self.broker = replace(address, host="localhost")
        self.state = root / "aggregator"
        self.fleet = fleet
        self._open_address = open_address
        with closing(open_store(self.state, lock=True, database=database, fleet=fleet)) as store:
            enroll_broker(store, ["broker.example"], fleet=fleet, out=root / "broker", days=30)

    def enroll(self, device: str, *, renew: bool = False, folder: str = "", key: bytes = b"") -> Path:
        """Enroll a device, by default with a new key; returns its folder."""
        out = self.root / (folder or device)
        with open_session(self.state) as session:
            enroll(
                session.store,
                device,
                broker=str(self.broker),
                renew=renew,
                fleet=self.fleet,
                out=out,
                key=key,
                write=session.change_keys,
            )
        return out

    def revoke(self, device: str) -> None:
        with open_session(self.state) as session:
            revoke(session.store, device, write=session.change_keys)

    def access(self, device: str) -> BrokerAccess:
        return read_enrollment(self.root / device).access

    def aggregator_access(self) -> BrokerAccess:
        return aggregator_access(self.state, BrokerAccess(tls=True), fleet=self.fleet)

    def configuration(self) -> str:
        return (self.root / "broker" / "mosquitto.conf").read_text(encoding="utf-8")

    def mosquitto(self, configuration: str = "", *, also: "ClosedFleet | None" = None) -> Mosquitto:
        """Return the broker, by default with the written configuration, whose paths lead to this folder.

        With a second listener, `also` is another fleet, which has one of its own on the same broker.
        """
        text = with_paths_of(self.root, configuration or self.configuration())
        if self._open_address is None:
            text = re.sub(r"(?m)^listener .*$", "", text)
            return Mosquitto(BrokerAddress("127.0.0.1", self.broker.port), self.root, options=text)
        text = f"per_listener_settings true\nallow_anonymous true\n{self._on_own_port(text)}"
        if also is not None:
            others = also._on_own_port(with_paths_of(also.root, also.configuration()))
            text += "\n".join(line for line in others.splitlines() if line.split(" ")[0] in _OF_A_LISTENER)
        return Mosquitto(self._open_address, self.root, options=text)

    def _on_own_port(self, text: str) -> str:
        return re.sub(r"(?m)^listener .*$", f"listener {self.broker.port} 127.0.0.1", text)

    def publish_revocations(self, broker: Mosquitto | None = None) -> None:
        """Copy the revocation list to the broker, and let it read it if it runs."""
        revoked = (self.state / "identity" / "revoked.crl").read_bytes()
        (self.root / "broker" / "revoked.crl").write_bytes(revoked)
        if broker is not None:
            broker.send_signal(signal.SIGHUP)


Findings = dict[str, list[dict[str, Any]]]
"""By check."""


def publish_task(closed: ClosedFleet, *, issued_s: float | None = None) -> None:
    """Let the broker retain a task that the aggregator has signed, a minute ago by default."""
    start_s = int(time.time() - 60 if issued_s is None else issued_s)
    payload = signed_manifest(
        encode(make_manifest(fleet=FLEET)), key=identity_of(closed.state), fleet=FLEET, channel="task", release=1,
        issued_s=start_s, expires_s=start_s + 3600,
    )  # fmt: skip
    with running(closed.broker, "aggregator", access=closed.aggregator_access()) as (session, log):
        log.wait(Connected)
        session.send(Outgoing(fleet_topic(FLEET, "task"), payload, retain=True))
        log.wait(Drained)


def findings(program: click.Command, *arguments: str) -> tuple[int, Findings]:
    """Run `doctor`; returns its exit status and its findings."""
    done = CliRunner().invoke(program, [*arguments, "--json"])
    assert done.stdout, (done.output, done.exception)
    found: Findings = {}
    for each in json.loads(done.stdout)["findings"]:
        found.setdefault(each["check"], []).append(each)
    return done.exit_code, found


def statuses(found: Findings) -> dict[str, str]:
    """Return the worst status of each check."""
    order = ("ok", "skipped", "warning", "failed")
    return {check: max((each["status"] for each in all_), key=order.index) for check, all_ in found.items()}
