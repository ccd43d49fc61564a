"""Attacks at the door: who gets a connection, under which name, and what names are."""

from collections.abc import Iterator
from dataclasses import replace

from click.testing import CliRunner

from aggregator.cli import cli as aggregator
from aggregator.security.identity import open_authority
from aggregator.security.pki import issue_client, issue_server, make_authority, utc_now
from edge_client.cli import cli as edge_client
from protocol.errors import ConfigError, StateError
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess
from tests.support.closed_fleet import FLEET
from tests.system.attacks.catalogue import attack
from tests.system.attacks.ground import HONEST, HOSTILE, Ground, own
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
"""What is no name: wildcards, paths, NUL, nothing, too much, and letters that look like others."""


@attack("connecting without a certificate of the fleet", stopped_by="broker", seen=(("no certificate", "?"),))
def strangers(ground: Ground) -> Iterator[bool]:
    """None, another fleet's, an expired one, one that signs itself, a broker's, and no encryption at all."""
    folder = ground.root / "strangers"
    folder.mkdir(exist_ok=True)
    real = ground.closed.access(HOSTILE)
    ours, theirs = open_authority(ground.closed.state, FLEET), make_authority("vineyard", now=utc_now())
    long_ago = utc_now().replace(year=utc_now().year - 2)
    issued = {
        "another-fleets": issue_client(theirs, HONEST[0], now=utc_now(), days=30),
        "expired": issue_client(ours, HONEST[0], now=long_ago, days=30),
        "its-own": make_authority(HONEST[0], now=utc_now()),
        "a-brokers": issue_server(ours, ["localhost"], now=utc_now(), days=30),
    }
    for name, each in issued.items():
        (folder / f"{name}.crt").write_bytes(each.certificate)
        (folder / f"{name}.key").write_bytes(each.key)
        access = replace(real, certificate=folder / f"{name}.crt", key=folder / f"{name}.key")
        yield Client(ground.closed.broker, access).connect()
    yield Client(ground.closed.broker, replace(real, certificate=None, key=None)).connect()
    named = replace(real, certificate=None, key=None, username=HONEST[0], password="")
    yield Client(ground.closed.broker, named).connect()
    yield Client(ground.closed.broker, NO_AUTHENTICATION).connect()


@attack("names that are none, in topics", stopped_by="broker, aggregator", seen=(("malformed", "?"),))
def strange_topics(ground: Ground) -> Iterator[bool]:
    """With wildcards, paths, NUL or nothing: not one reaches the aggregator as anybody's."""
    known = ground.names()
    with Witness(ground.open) as witness:
        for name in STRANGE:
            topic = f"pf/1/{FLEET}/d/{name}/state".encode()
            raw_publish(ground.closed.broker, ground.closed.access(HOSTILE), topic, b"closed")
            raw_publish(ground.open, NO_AUTHENTICATION, topic, b"open")
            witness.settle()
            yield any(heard.payload == b"closed" for heard in witness.heard)
    ground.until("the refusals", lambda: ground.refusals()["malformed", "?"])
    yield ground.names() != known


@attack(
    "names that are none, in certificates of the fleet's own authority",
    stopped_by="broker, aggregator",
    but="not: nobody outside has the authority's key",
)
def strange_certificates(ground: Ground) -> Iterator[bool]:
    """Who has the authority's key can make a certificate for anything; it still is nobody else's name."""
    folder, ours = ground.root / "strange", open_authority(ground.closed.state, FLEET)
    folder.mkdir(exist_ok=True)
    known, victim = ground.names(), own(HONEST[0], "state")
    with Witness(ground.open) as witness:
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
                ca=ground.closed.access(HOSTILE).ca,
                certificate=folder / f"{number}.crt",
                key=folder / f"{number}.key",
            )
            taken = raw_publish(ground.closed.broker, access, victim.encode(), b"strange")
            topic = f"pf/1/{FLEET}/d/{name}/state"
            raw_publish(ground.closed.broker, access, topic.encode(), b"strange")
            witness.settle()
            yield taken and b"strange" in witness.said(victim)
    yield ground.names() != known


@attack(
    "names that are none, in commands",
    stopped_by="aggregator, device",
    but="not: the command ends with what it expected",
)
def strange_commands(ground: Ground) -> Iterator[bool]:
    """`aggregator enroll` and `edge-client --device-id` end with an error, and leave nothing."""
    out = ground.root / "strange-folder"
    enroll = ["enroll", "--state", str(ground.closed.state), "--out", str(out), "--"]
    for name in STRANGE:
        done = CliRunner().invoke(aggregator, [*enroll, name])
        assert isinstance(done.exception, ConfigError)
        yield done.exit_code == 0 or out.exists()
    data, state = str(ground.data[HONEST[0]]), str(ground.root / "strange-state")
    device = ["--broker", str(ground.open), "--data", data, "--state", state, "--once", "--device-id"]
    for name in (name for name in STRANGE if name):
        done = CliRunner().invoke(edge_client, [*device, name])
        assert isinstance(done.exception, StateError)
        yield done.exit_code == 0
