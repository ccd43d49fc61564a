"""Attacks on authentication: connections without a valid certificate, and invalid names."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from click.testing import CliRunner

from aggregator.cli import cli as aggregator
from aggregator.security.certificate_authority import Issued, create_ca, issue_client, issue_server, utc_now
from aggregator.security.identity import open_ca
from edge_client.cli import cli as edge_client
from protocol.errors import ConfigError, StateError
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess
from tests.support.fleets.closed_fleet import FLEET
from tests.system.attacks.attacker_client import AttackerClient, TrafficMonitor, raw_publish
from tests.system.attacks.fleet import HONEST, MALLORY, AttackedFleet, attack, own

VICTIM = HONEST[0]
INVALID_NAMES = (
    *("#", "+", "a/b", "/", "..", "../shed-1", "shed-1/state", "shed-1\0", "shed-1 "),
    *("\u0455hed-1", "\N{FULLWIDTH LATIN SMALL LETTER S}hed-1", "a" * 65, ""),
)
"""Wildcards, paths, NUL, letters that look like others, too long, and empty."""


def _access(fleet: AttackedFleet, folder: Path, name: str, issued: Issued) -> BrokerAccess:
    """Write a certificate and its key; returns the broker access that uses them."""
    folder.mkdir(exist_ok=True)
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    certificate.write_bytes(issued.certificate)
    key.write_bytes(issued.key)
    return replace(fleet.closed.access(MALLORY), certificate=certificate, key=key)


@attack(
    "connecting without a certificate of the fleet", stopped_by="broker", counted=(("no certificate", "?"),)
)
def invalid_certificates(fleet: AttackedFleet) -> Iterator[bool]:
    """None, another fleet's, an expired one, a self-signed one, a broker's, and a connection without TLS."""
    real = fleet.closed.access(MALLORY)
    ours, theirs = open_ca(fleet.aggregator_state, FLEET), create_ca("vineyard", now=utc_now())
    an_hour_ago = utc_now() - timedelta(hours=1)
    issued = {
        "other-fleet": issue_client(theirs, VICTIM, now=utc_now(), days=30),
        "expired": issue_client(ours, VICTIM, now=an_hour_ago, days=0),
        "self-signed": create_ca(VICTIM, now=utc_now()),
        "broker": issue_server(ours, ["localhost"], now=utc_now(), days=30),
    }
    without = replace(real, certificate=None, key=None)
    for access in (
        *(_access(fleet, fleet.root / "invalid-certificates", *each) for each in issued.items()),
        without,
        replace(without, username=VICTIM, password=""),
        NO_AUTHENTICATION,
    ):
        yield AttackerClient(fleet.broker, access).connect()


@attack("invalid device names in topics", stopped_by="broker, aggregator", counted=(("malformed", "?"),))
def names_in_topics(fleet: AttackedFleet) -> Iterator[bool]:
    """With wildcards, paths, NUL or nothing: none becomes a device of the aggregator."""
    known = fleet.names()
    with TrafficMonitor(fleet.open) as monitor:
        for name in INVALID_NAMES:
            topic = f"pf/1/{FLEET}/d/{name}/state".encode()
            raw_publish(fleet.broker, fleet.closed.access(MALLORY), topic, b"closed")
            raw_publish(fleet.open, NO_AUTHENTICATION, topic, b"open")
            monitor.settle()
            yield any(message.payload == b"closed" for message in monitor.received)
    fleet.wait_until("the refusals", lambda: fleet.refusals()["malformed", "?"])
    yield fleet.names() != known


@attack(
    "invalid device names in certificates signed by the fleet's authority",
    stopped_by="broker, aggregator",
    otherwise="nowhere: only the aggregator has the authority's key",
)
def names_in_certificates(fleet: AttackedFleet) -> Iterator[bool]:
    """A certificate of the fleet's authority for an invalid name gives access to no other device's topics."""
    ours, known, topic = open_ca(fleet.aggregator_state, FLEET), fleet.names(), own(VICTIM, "state")
    with TrafficMonitor(fleet.open) as monitor:
        for number, name in enumerate(INVALID_NAMES):
            try:
                issued = issue_client(ours, name, now=utc_now(), days=30)
            except (ConfigError, ValueError):  # a certificate cannot have it
                yield False
                continue
            access = _access(fleet, fleet.root / "invalid-names", str(number), issued)
            accepted = raw_publish(fleet.broker, access, topic.encode(), b"invalid")
            raw_publish(fleet.broker, access, f"pf/1/{FLEET}/d/{name}/state".encode(), b"invalid")
            monitor.settle()
            yield accepted and b"invalid" in monitor.payloads(topic)
    yield fleet.names() != known


@attack(
    "invalid device names in commands",
    stopped_by="aggregator, device",
    otherwise="nowhere: the command exits with an error",
)
def names_in_commands(fleet: AttackedFleet) -> Iterator[bool]:
    """`aggregator enroll` and `edge-client --device-id` end with an error, and leave nothing."""
    out = fleet.root / "invalid-enrollment"
    enroll = ["enroll", "--state", str(fleet.aggregator_state), "--out", str(out), "--"]
    for name in INVALID_NAMES:
        done = CliRunner().invoke(aggregator, [*enroll, name])
        assert isinstance(done.exception, ConfigError)
        yield done.exit_code == 0 or out.exists()
    data, state = str(fleet.data[VICTIM]), str(fleet.root / "invalid-device")
    device = ["--broker", str(fleet.open), "--data", data, "--state", state, "--once", "--device-id"]
    for name in filter(None, INVALID_NAMES):
        done = CliRunner().invoke(edge_client, [*device, name])
        assert isinstance(done.exception, StateError)
        yield done.exit_code == 0
