"""Attacks by topics: publishing and subscribing to other clients' topics."""

import os
import time
from collections.abc import Iterable, Iterator

from protocol.wire.codec import encode
from protocol.wire.messages import DeviceInfo, HeadManifest, Presence, Receipt
from protocol.wire.signing import sign_manifest
from protocol.wire.topics import FleetChannel
from tests.support.closed_fleet import FLEET
from tests.system.attacks.catalogue import attack
from tests.system.attacks.fleet import HONEST, HOSTILE, AttackedFleet, own, shared
from tests.system.attacks.hostile import Witness

VICTIM = HONEST[0]
MANIFESTS: tuple[FleetChannel, ...] = ("task", "round", "head")
SAID = tuple[str, bytes]


def through_broker(fleet: AttackedFleet, said: Iterable[SAID], *, retain: bool = True) -> Iterator[bool]:
    """Have the dishonest device publish where the broker has an access list; nothing may reach a client."""
    with Witness(fleet.open) as witness, fleet.mallory() as mallory:
        for topic, payload in said:
            taken = mallory.publish(topic, payload, retain=retain)
            witness.settle()
            yield taken or payload in witness.said(topic)


def until_counted(
    fleet: AttackedFleet, said: Iterable[SAID], *, by: Iterable[str], reason: str
) -> Iterator[bool]:
    """Publish past the broker, until status counts that devices have refused the messages.

    Devices report their counts at powers of two, so the last message is repeated until then.
    """
    before, devices, last = fleet.refusals(), tuple(by), None
    with fleet.inside() as operator:
        for last in said:
            yield from _ignored(fleet, operator.publish, last, devices)
        while last is not None and not all(
            fleet.refusals()[reason, f"by {name}"] > before[reason, f"by {name}"] for name in devices
        ):
            yield from _ignored(fleet, operator.publish, last, devices)
            time.sleep(0.3)


def _ignored(fleet: AttackedFleet, publish: object, said: SAID, devices: tuple[str, ...]) -> Iterator[bool]:
    before = {name: fleet.ignored(name) for name in devices}
    assert callable(publish)
    assert publish(*said, retain=True)
    fleet.wait_until(
        f"{said[0]} is ignored",
        lambda: all(fleet.ignored(name) > before[name] for name in devices),
    )
    yield False


@attack(
    "writing another device's topics",
    stopped_by="broker, aggregator",
    seen=(("denied", HOSTILE), ("signature", VICTIM)),
)
def others_topics(fleet: AttackedFleet) -> Iterator[bool]:
    """Its submission, presence, info and requests; with its own frames, and signed with the wrong key."""
    forged = fleet.forged_frame(VICTIM, signer=HOSTILE)
    lies = [
        (own(VICTIM, "state"), encode(Presence(state="offline", epoch=2**40))),
        (
            own(VICTIM, "info"),
            encode(
                DeviceInfo(
                    epoch=2**40, software="lies", runtime="cpu", backbones=(), images={}, unusable_images=0
                )
            ),
        ),
        (own(VICTIM, "get"), b"\xc0"),
        (own(VICTIM, "up"), forged),
        *((own(VICTIM, "up"), frame) for frame in fleet.frames()),
    ]
    yield from through_broker(fleet, lies)
    yield from fleet.refused_inside([(VICTIM, forged)], reason="signature")


@attack(
    "speaking for the aggregator",
    stopped_by="broker, device",
    seen=(("denied", HOSTILE), *(("signature", f"by {name}") for name in HONEST)),
)
def for_the_aggregator(fleet: AttackedFleet) -> Iterator[bool]:
    """Task, round, head, casts, receipts, blobs and presence; and manifests that are signed with another key."""
    signed, _ = fleet.head_manifest()
    forged = {
        channel: sign_manifest(
            signed.body,
            key=fleet.key(HOSTILE),
            fleet=FLEET,
            channel=channel,
            release=signed.release + 10**6,
        )
        for channel in MANIFESTS
    }
    receipt = Receipt(digest=bytes(32), status="refused", reason="unknown_device")
    lies = [
        *((shared(channel), payload) for channel, payload in forged.items()),
        (shared("cast"), fleet.frames()[0]),
        (shared("state"), encode(Presence(state="online", epoch=2**40))),
        (own(VICTIM, "ack"), encode(receipt)),
        (own(VICTIM, "blk"), fleet.frames()[0]),
    ]
    yield from through_broker(fleet, lies)
    for channel, payload in forged.items():
        yield from until_counted(fleet, [(shared(channel), payload)], by=HONEST, reason="signature")
        fleet.restore(channel)


@attack(
    "a Last Will on another's topic",
    stopped_by="broker, device",
    seen=tuple(("signature", f"by {name}") for name in HONEST),
)
def wills(fleet: AttackedFleet) -> Iterator[bool]:
    """Another device's presence, the aggregator's, and the head, as the will of a client that vanishes."""
    signed, _ = fleet.head_manifest()
    head = sign_manifest(signed.body, key=fleet.key(HOSTILE), fleet=FLEET, channel="head", release=2**40)
    gone = encode(Presence(state="offline", epoch=2**40))
    wills = [(own(VICTIM, "state"), gone), (shared("state"), gone), (shared("head"), head)]
    with Witness(fleet.open) as witness:
        for will in wills:
            client = fleet.mallory(will=will)
            if client.connect():
                client.vanish()
                witness.settle()
                time.sleep(0.3)
                witness.settle()
            yield will[1] in witness.said(will[0])
    before = {name: fleet.ignored(name) for name in HONEST}
    client = fleet.inside(will=wills[2])
    assert client.connect()
    client.vanish()
    fleet.wait_until(
        "the will is ignored", lambda: all(fleet.ignored(name) > before[name] for name in HONEST)
    )
    yield False
    yield from until_counted(fleet, [wills[2]], by=HONEST, reason="signature")
    fleet.restore("head")


@attack("junk of 100 kB, retained on its own topics", stopped_by="aggregator", seen=(("malformed", HOSTILE),))
def garbage(fleet: AttackedFleet) -> Iterator[bool]:
    """The broker retains it, for these are its own topics; the aggregator stores nothing of it."""
    with fleet.mallory() as mallory:
        for number in range(10):
            junk = os.urandom(100_000)
            with fleet.counted("malformed", HOSTILE):
                assert mallory.publish(own(HOSTILE, "info" if number % 2 else "state"), junk, retain=True)
            yield fleet.stores(junk[:64])
        for channel in ("state", "info"):
            mallory.publish(f"pf/1/{FLEET}/d/{HOSTILE}/{channel}", b"", retain=True)


@attack("listening to everything", stopped_by="broker", but="not: a broker does not log denied subscribers")
def eavesdropping(fleet: AttackedFleet) -> Iterator[bool]:
    """A device that subscribes to everything gets the fleet's manifests and nothing of another device."""
    filters = (
        "#",
        "pf/#",
        f"pf/1/{FLEET}/d/#",
        f"pf/1/{FLEET}/d/{VICTIM}/#",
        f"pf/1/{FLEET}/d/+/up/+",
        "$SYS/#",
    )
    may = {*(shared(channel) for channel in ("task", "round", "head", "state", "cast"))}
    may |= {own(HOSTILE, channel) for channel in ("state", "ack", "blk")}
    with fleet.mallory() as mallory, Witness(fleet.open) as witness:
        for each in filters:
            mallory.subscribe(each)
        for payload in fleet.frames():
            for channel in ("up", "blk", "ack", "get", "info"):
                assert witness.publish(own(VICTIM, channel), payload)
        witness.settle()
        assert mallory.publish(own(HOSTILE, "get"), b"\xc0")
        assert witness.publish(own(HOSTILE, "ack"), b"the end")
        fleet.wait_until("the end", lambda: any(heard.payload == b"the end" for heard in mallory.heard))
        heard = {heard.topic for heard in mallory.heard}
        assert shared("head") in heard
        for _ in filters:
            yield not heard <= may


@attack(
    "a head that is another's, changed, or of another topic",
    stopped_by="device",
    seen=tuple(("signature", f"by {name}") for name in HONEST),
)
def forged_heads(fleet: AttackedFleet) -> Iterator[bool]:
    """The aggregator's own manifest with a byte changed, of another channel, or of another fleet."""
    said = fleet.published("head")[-1]
    signed, manifest = fleet.head_manifest()
    assert isinstance(manifest, HeadManifest)
    at = said.index(signed.body) + signed.body.index(manifest.current.head.digest)
    changed = said[:at] + bytes([said[at] ^ 1]) + said[at + 1 :]
    elsewhere = sign_manifest(
        signed.body, key=fleet.aggregator_key(), fleet="vineyard", channel="head", release=2**40
    )
    lies = [(shared("head"), payload) for payload in (changed, elsewhere, fleet.published("task")[-1])]
    yield from through_broker(fleet, lies)
    yield from until_counted(fleet, lies, by=HONEST, reason="signature")
    fleet.restore("head")
