"""Attacks on authentication: connections without a valid certificate, and invalid names."""

from collections.abc import Iterator
from dataclasses import replace

from click.testing import CliRunner

from aggregator.cli import cli as aggregator
from aggregator.security.certificates import create_ca, issue_client, issue_server, utc_now
from aggregator.security.identity import open_ca
from edge_client.cli import cli as edge_client
from protocol.errors import ConfigError, StateError
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess
from tests.support.closed_fleet import FLEET
from tests.system.attacks.catalogue import attack
from tests.system.attacks.fleet import HONEST, HOSTILE, AttackedFleet, own
from tests.system.attacks.hostile import Client, Witness, raw_publish

STRANGE = (
    "#",
    "+",
    "a/b",
    "/",
    "..",
    "../shed-1",
    "shed-1/state",
    "shed-1\0",
    "shed-1 ",
    "\u0455hed-1",
    "\N{FULLWIDTH LATIN SMALL LETTER S}hed-1",
    "a" * 65,
    "",
)
"""Invalid names: wildcards, paths, NUL, empty, too long, and letters that look like others."""


@attack("connecting without a certificate of the fleet", stopped_by="broker", seen=(("no certificate", "?"),))
def strangers(fleet: AttackedFleet) -> Iterator[bool]:
    """None, another fleet's, an expired one, one that signs itself, a broker's, and no encryption at all."""
    folder = fleet.root / "strangers"
    folder.mkdir(exist_ok=True)
    real = fleet.closed.access(HOSTILE)
    ours, theirs = open_ca(fleet.aggregator_state, FLEET), create_ca("vineyard", now=utc_now())
    long_ago = utc_now().replace(year=utc_now().year - 2)
    issued = {
        "another-fleets": issue_client(theirs, HONEST[0], now=utc_now(), days=30),
        "expired": issue_client(ours, HONEST[0], now=long_ago, days=30),
        "its-own": create_ca(HONEST[0], now=utc_now()),
        "a-brokers": issue_server(ours, ["localhost"], now=utc_now(), days=30),
    }
    for name, each in issued.items():
        (folder / f"{name}.crt").write_bytes(each.certificate)
        (folder / f"{name}.key").write_bytes(each.key)
        access = replace(real, certificate=folder / f"{name}.crt", key=folder / f"{name}.key")
        yield Client(fleet.broker, access).connect()
    yield Client(fleet.broker, replace(real, certificate=None, key=None)).connect()
    named = replace(real, certificate=None, key=None, username=HONEST[0], password="")
    yield Client(fleet.broker, named).connect()
    yield Client(fleet.broker, NO_AUTHENTICATION).connect()


@attack("names that are none, in topics", stopped_by="broker, aggregator", seen=(("malformed", "?"),))
def strange_topics(fleet: AttackedFleet) -> Iterator[bool]:
    """With wildcards, paths, NUL or nothing: none becomes a device of the aggregator."""
    known = fleet.names()
    with Witness(fleet.open) as witness:
        for name in STRANGE:
            topic = f"pf/1/{FLEET}/d/{name}/state".encode()
            raw_publish(fleet.broker, fleet.closed.access(HOSTILE), topic, b"closed")
            raw_publish(fleet.open, NO_AUTHENTICATION, topic, b"open")
            witness.settle()
            yield any(heard.payload == b"closed" for heard in witness.heard)
    fleet.wait_until("the refusals", lambda: fleet.refusals()["malformed", "?"])
    yield fleet.names() != known


@attack(
    "names that are none, in certificates of the fleet's own authority",
    stopped_by="broker, aggregator",
    but="not: only the aggregator has the authority's key",
)
def strange_certificates(fleet: AttackedFleet) -> Iterator[bool]:
    """A certificate of the fleet's authority for an invalid name gives access to no other device's topics."""
    folder, ours = fleet.root / "strange", open_ca(fleet.aggregator_state, FLEET)
    folder.mkdir(exist_ok=True)
    known, victim = fleet.names(), own(HONEST[0], "state")
    with Witness(fleet.open) as witness:
        for number, name in enumerate(STRANGE):
            try:
                issued = issue_client(ours, name, now=utc_now(), days=30)
            except (ConfigError, ValueError):  # a certificate cannot have it
                yield False
                continue
            (folder / f"{number}.crt").write_bytes(issued.certificate)
            (folder / f"{number}.key").write_bytes(issued.key)
            access = BrokerAccess(
                tls=True,
                ca=fleet.closed.access(HOSTILE).ca,
                certificate=folder / f"{number}.crt",
                key=folder / f"{number}.key",
            )
            taken = raw_publish(fleet.broker, access, victim.encode(), b"strange")
            topic = f"pf/1/{FLEET}/d/{name}/state"
            raw_publish(fleet.broker, access, topic.encode(), b"strange")
            witness.settle()
            yield taken and b"strange" in witness.said(victim)
    yield fleet.names() != known


@attack(
    "names that are none, in commands",
    stopped_by="aggregator, device",
    but="not: the command ends with what it expected",
)
def strange_commands(fleet: AttackedFleet) -> Iterator[bool]:
    """`aggregator enroll` and `edge-client --device-id` end with an error, and leave nothing."""
    out = fleet.root / "strange-folder"
    enroll = ["enroll", "--state", str(fleet.aggregator_state), "--out", str(out), "--"]
    for name in STRANGE:
        done = CliRunner().invoke(aggregator, [*enroll, name])
        assert isinstance(done.exception, ConfigError)
        yield done.exit_code == 0 or out.exists()
    data, state = str(fleet.data[HONEST[0]]), str(fleet.root / "strange-state")
    device = ["--broker", str(fleet.open), "--data", data, "--state", state, "--once", "--device-id"]
    for name in (name for name in STRANGE if name):
        done = CliRunner().invoke(edge_client, [*device, name])
        assert isinstance(done.exception, StateError)
        yield done.exit_code == 0
