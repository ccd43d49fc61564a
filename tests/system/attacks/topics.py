"""Attacks by topics: who may say what where, and who hears it."""

import os
import time
from collections.abc import Iterable, Iterator

from protocol.wire.codec import encode
from protocol.wire.messages import DeviceInfo, HeadManifest, Presence, Receipt
from protocol.wire.signing import sign_manifest
from protocol.wire.topics import FleetChannel
from tests.support.closed_fleet import FLEET
from tests.system.attacks.catalogue import attack
from tests.system.attacks.ground import HONEST, HOSTILE, Ground, own, shared
from tests.system.attacks.hostile import Witness

VICTIM = HONEST[0]
MANIFESTS: tuple[FleetChannel, ...] = ("task", "round", "head")
SAID = tuple[str, bytes]


def at_the_door(ground: Ground, said: Iterable[SAID], *, retain: bool = True) -> Iterator[bool]:
    """Have the dishonest device say things where the broker has an access list; none of it may reach anybody."""
    with Witness(ground.open) as witness, ground.mallory() as mallory:
        for topic, payload in said:
            taken = mallory.publish(topic, payload, retain=retain)
            witness.settle()
            yield taken or payload in witness.said(topic)


def until_counted(ground: Ground, said: Iterable[SAID], *, by: Iterable[str], reason: str) -> Iterator[bool]:
    """Say things where the broker stops nobody, until devices have told that they did not believe them.

    They tell at each power of two, so the last one is said again until then.
    """
    before, devices, last = ground.refusals(), tuple(by), None
    with ground.inside() as operator:
        for last in said:
            yield from _disbelieved(ground, operator.publish, last, devices)
        while last is not None and not all(
            ground.refusals()[reason, f"by {name}"] > before[reason, f"by {name}"] for name in devices
        ):
            yield from _disbelieved(ground, operator.publish, last, devices)
            time.sleep(0.3)


def _disbelieved(ground: Ground, publish: object, said: SAID, devices: tuple[str, ...]) -> Iterator[bool]:
    before = {name: ground.disbelieved(name) for name in devices}
    assert callable(publish)
    assert publish(*said, retain=True)
    ground.until(
        f"{said[0]} is not believed",
        lambda: all(ground.disbelieved(name) > before[name] for name in devices),
    )
    yield False


@attack(
    "writing another device's topics",
    stopped_by="broker, aggregator",
    seen=(("denied", HOSTILE), ("signature", VICTIM)),
)
def others_topics(ground: Ground) -> Iterator[bool]:
    """Its submission, presence, info and requests; with its own frames, and signed with the wrong key."""
    forged = ground.forged_frame(VICTIM, signer=HOSTILE)
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
        *((own(VICTIM, "up"), frame) for frame in ground.frames()),
    ]
    yield from at_the_door(ground, lies)
    yield from ground.refused_inside([(VICTIM, forged)], reason="signature")


@attack(
    "speaking for the aggregator",
    stopped_by="broker, device",
    seen=(("denied", HOSTILE), *(("signature", f"by {name}") for name in HONEST)),
)
def for_the_aggregator(ground: Ground) -> Iterator[bool]:
    """Task, round, head, casts, receipts, blobs and presence; and manifests that are signed with another key."""
    signed, _ = ground.head_manifest()
    forged = {
        channel: sign_manifest(
            signed.body,
            key=ground.key(HOSTILE),
            fleet=FLEET,
            channel=channel,
            release=signed.release + 10**6,
        )
        for channel in MANIFESTS
    }
    receipt = Receipt(digest=bytes(32), status="refused", reason="unknown_device")
    lies = [
        *((shared(channel), payload) for channel, payload in forged.items()),
        (shared("cast"), ground.frames()[0]),
        (shared("state"), encode(Presence(state="online", epoch=2**40))),
        (own(VICTIM, "ack"), encode(receipt)),
        (own(VICTIM, "blk"), ground.frames()[0]),
    ]
    yield from at_the_door(ground, lies)
    for channel, payload in forged.items():
        yield from until_counted(ground, [(shared(channel), payload)], by=HONEST, reason="signature")
        ground.restore(channel)


@attack(
    "a Last Will on another's topic",
    stopped_by="broker, device",
    seen=tuple(("signature", f"by {name}") for name in HONEST),
)
def wills(ground: Ground) -> Iterator[bool]:
    """Another device's presence, the aggregator's, and the head: said by the broker for who has vanished."""
    signed, _ = ground.head_manifest()
    head = sign_manifest(signed.body, key=ground.key(HOSTILE), fleet=FLEET, channel="head", release=2**40)
    gone = encode(Presence(state="offline", epoch=2**40))
    wills = [(own(VICTIM, "state"), gone), (shared("state"), gone), (shared("head"), head)]
    with Witness(ground.open) as witness:
        for will in wills:
            client = ground.mallory(will=will)
            if client.connect():
                client.vanish()
                witness.settle()
                time.sleep(0.3)
                witness.settle()
            yield will[1] in witness.said(will[0])
    before = {name: ground.disbelieved(name) for name in HONEST}
    client = ground.inside(will=wills[2])
    assert client.connect()
    client.vanish()
    ground.until(
        "the will is not believed", lambda: all(ground.disbelieved(name) > before[name] for name in HONEST)
    )
    yield False
    yield from until_counted(ground, [wills[2]], by=HONEST, reason="signature")
    ground.restore("head")


@attack("junk of 100 kB, retained on its own topics", stopped_by="aggregator", seen=(("malformed", HOSTILE),))
def garbage(ground: Ground) -> Iterator[bool]:
    """The broker keeps it, for these are its own topics; the aggregator keeps nothing of it."""
    with ground.mallory() as mallory:
        for number in range(10):
            junk = os.urandom(100_000)
            with ground.counted("malformed", HOSTILE):
                assert mallory.publish(own(HOSTILE, "info" if number % 2 else "state"), junk, retain=True)
            yield ground.keeps(junk[:64])
        for channel in ("state", "info"):
            mallory.publish(f"pf/1/{FLEET}/d/{HOSTILE}/{channel}", b"", retain=True)


@attack("listening to everything", stopped_by="broker", but="not: a broker does not tell who listens in vain")
def eavesdropping(ground: Ground) -> Iterator[bool]:
    """A device that subscribes to all there is hears the fleet's manifests and nothing of another device."""
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
    with ground.mallory() as mallory, Witness(ground.open) as witness:
        for each in filters:
            mallory.subscribe(each)
        for payload in ground.frames():
            for channel in ("up", "blk", "ack", "get", "info"):
                assert witness.publish(own(VICTIM, channel), payload)
        witness.settle()
        assert mallory.publish(own(HOSTILE, "get"), b"\xc0")
        assert witness.publish(own(HOSTILE, "ack"), b"the end")
        ground.until("the end", lambda: any(heard.payload == b"the end" for heard in mallory.heard))
        heard = {heard.topic for heard in mallory.heard}
        assert shared("head") in heard
        for _ in filters:
            yield not heard <= may


@attack(
    "a head that is another's, changed, or of another topic",
    stopped_by="device",
    seen=tuple(("signature", f"by {name}") for name in HONEST),
)
def forged_heads(ground: Ground) -> Iterator[bool]:
    """The aggregator's own word with a byte changed, or one that it has said elsewhere, or to another fleet."""
    said = ground.told("head")[-1]
    signed, manifest = ground.head_manifest()
    assert isinstance(manifest, HeadManifest)
    at = said.index(signed.body) + signed.body.index(manifest.current.head.digest)
    changed = said[:at] + bytes([said[at] ^ 1]) + said[at + 1 :]
    elsewhere = sign_manifest(
        signed.body, key=ground.aggregators_key(), fleet="vineyard", channel="head", release=2**40
    )
    lies = [(shared("head"), payload) for payload in (changed, elsewhere, ground.told("task")[-1])]
    yield from at_the_door(ground, lies)
    yield from until_counted(ground, lies, by=HONEST, reason="signature")
    ground.restore("head")
