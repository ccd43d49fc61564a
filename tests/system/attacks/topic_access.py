"""Attacks by topics: publishing and subscribing to other clients' topics."""

import os
import time
from collections.abc import Iterable, Iterator

from protocol.wire.codec import encode
from protocol.wire.messages import Presence, Receipt
from protocol.wire.signing import sign_presence
from protocol.wire.topics import FleetChannel
from tests.support.fleets.closed_fleet import FLEET
from tests.support.messages.manifests import signed_manifest
from tests.support.messages.submissions import device_info
from tests.system.attacks.attacker_client import TIMEOUT_S, TrafficMonitor
from tests.system.attacks.fleet import HONEST, MALLORY, AttackedFleet, attack, own, shared

VICTIM = HONEST[0]
MANIFESTS: tuple[FleetChannel, ...] = ("task", "round", "head")
REFUSED_SIGNATURES = tuple(("signature", f"by {name}") for name in HONEST)
Publication = tuple[str, bytes]


def publish_to_broker(
    fleet: AttackedFleet, publications: Iterable[Publication], *, retain: bool = True
) -> Iterator[bool]:
    """Publish as the malicious device, where the broker has an access list; nothing may reach a client."""
    with TrafficMonitor(fleet.open) as monitor, fleet.client_of() as client:
        for topic, payload in publications:
            accepted = client.publish(topic, payload, retain=retain)
            monitor.settle()
            yield accepted or payload in monitor.payloads(topic)


def refused_by_devices(
    fleet: AttackedFleet, publications: Iterable[Publication], *, reason: str
) -> Iterator[bool]:
    """Publish past the broker, until status counts that all honest devices have refused the messages.

    Devices report their counts at powers of two, so the last message is repeated until then.
    """
    before, deadline = fleet.refusals(), time.monotonic() + TIMEOUT_S
    with fleet.inside() as client:
        for publication in publications:
            with fleet.ignored_by_devices():
                assert client.publish(*publication, retain=True)
            yield False
        while not all(
            fleet.refusals()[reason, f"by {name}"] > before[reason, f"by {name}"] for name in HONEST
        ):
            assert time.monotonic() < deadline, fleet.diagnostics()
            with fleet.ignored_by_devices():
                assert client.publish(*publication, retain=True)
            yield False
            time.sleep(0.3)


@attack(
    "publishing on another device's topics",
    stopped_by="broker, aggregator",
    counted=(("denied", MALLORY), ("signature", VICTIM)),
)
def topics_of_others(fleet: AttackedFleet) -> Iterator[bool]:
    """Its submission, presence, info and requests; with recorded frames, and signed with another key."""
    forged = fleet.upload_of(b"forged", VICTIM, signer=MALLORY)
    publications = [
        (own(VICTIM, "state"), encode(Presence(state="offline", epoch=2**40))),
        (own(VICTIM, "info"), encode(device_info(epoch=2**40))),
        (own(VICTIM, "get"), b"\xc0"),
        *((own(VICTIM, "up"), frame) for frame in (*forged, *fleet.frames())),
    ]
    yield from publish_to_broker(fleet, publications)
    yield from fleet.refused_by_aggregator(forged, VICTIM, reason="signature")


@attack(
    "forging another device's presence, past the broker",
    stopped_by="aggregator",
    counted=(("signature", VICTIM),),
)
def forged_presences(fleet: AttackedFleet) -> Iterator[bool]:
    """Without a signature, with the attacker's, and with one for another topic; of the greatest epoch."""
    offline, key = Presence(state="offline", epoch=2**63 - 1), fleet.key(VICTIM)
    forged = [
        offline,
        sign_presence(offline, key=fleet.key(MALLORY), topic=own(VICTIM, "state")),
        sign_presence(offline, key=key, topic=own(MALLORY, "state")),
    ]
    with fleet.inside() as client:
        for presence in forged:
            with fleet.counted("signature", VICTIM):
                assert client.publish(own(VICTIM, "state"), encode(presence), retain=True)
            yield fleet.states()[VICTIM] != "online"


@attack(
    "publishing on the aggregator's topics",
    stopped_by="broker, device",
    counted=(("denied", MALLORY), *REFUSED_SIGNATURES),
)
def topics_of_aggregator(fleet: AttackedFleet) -> Iterator[bool]:
    """Task, round, head, casts, receipts, blobs and presence; and manifests that are signed with another key."""
    signed, _ = fleet.head_manifest()
    key, release = fleet.key(MALLORY), signed.release + 10**6
    forged = {
        channel: signed_manifest(signed.body, key=key, fleet=FLEET, channel=channel, release=release)
        for channel in MANIFESTS
    }
    receipt = Receipt(digest=bytes(32), status="refused", reason="unknown_device")
    publications = [
        *((shared(channel), payload) for channel, payload in forged.items()),
        (shared("cast"), fleet.frames()[0]),
        (shared("state"), encode(Presence(state="online", epoch=2**40))),
        (own(VICTIM, "ack"), encode(receipt)),
        (own(VICTIM, "blk"), fleet.frames()[0]),
    ]
    yield from publish_to_broker(fleet, publications)
    for channel, payload in forged.items():
        yield from refused_by_devices(fleet, [(shared(channel), payload)], reason="signature")
        fleet.restore(channel)


@attack("a last will on another client's topic", stopped_by="broker, device", counted=REFUSED_SIGNATURES)
def last_wills(fleet: AttackedFleet) -> Iterator[bool]:
    """Another device's presence, the aggregator's, and the head, as the last will of a client that vanishes."""
    signed, _ = fleet.head_manifest()
    head = signed_manifest(signed.body, key=fleet.key(MALLORY), fleet=FLEET, channel="head", release=2**40)
    offline = encode(Presence(state="offline", epoch=2**40))
    wills = [(own(VICTIM, "state"), offline), (shared("state"), offline), (shared("head"), head)]
    with TrafficMonitor(fleet.open) as monitor:
        for topic, payload in wills:
            client = fleet.client_of(will=(topic, payload))
            if client.connect():
                client.vanish()
                with (
                    fleet.client_of()
                ):  # the same client ID: before this, the broker has ended the first connection
                    monitor.settle()
            yield payload in monitor.payloads(topic)
    client = fleet.inside(will=wills[2])
    assert client.connect()
    with fleet.ignored_by_devices():
        client.vanish()
    yield False
    yield from refused_by_devices(fleet, [wills[2]], reason="signature")
    fleet.restore("head")


@attack(
    "random bytes (100 kB) retained on its own topics",
    stopped_by="aggregator",
    counted=(("malformed", MALLORY),),
)
def random_bytes(fleet: AttackedFleet) -> Iterator[bool]:
    """The broker retains them, for these are its own topics; the aggregator stores nothing of them."""
    with fleet.client_of() as client:
        for number in range(10):
            payload = os.urandom(100_000)
            with fleet.counted("malformed", MALLORY):
                assert client.publish(own(MALLORY, "info" if number % 2 else "state"), payload, retain=True)
            yield fleet.stores(payload[:64])
        client.publish(own(MALLORY, "state"), b"", retain=True)
        client.publish(own(MALLORY, "info"), b"", retain=True)


@attack(
    "subscribing to all topics",
    stopped_by="broker",
    otherwise="nowhere: a broker does not log denied subscriptions",
)
def eavesdropping(fleet: AttackedFleet) -> Iterator[bool]:
    """A device that subscribes to everything gets the fleet's manifests and nothing of another device."""
    device_topics = f"pf/1/{FLEET}/d"
    filters = (
        "#",
        "pf/#",
        f"{device_topics}/#",
        f"{device_topics}/{VICTIM}/#",
        f"{device_topics}/+/up/+",
        "$SYS/#",
    )
    allowed = {shared("task"), shared("round"), shared("head"), shared("state"), shared("cast")}
    allowed |= {own(MALLORY, "state"), own(MALLORY, "ack"), own(MALLORY, "blk")}
    with fleet.client_of() as client, TrafficMonitor(fleet.open) as monitor:
        for each in filters:
            client.subscribe(each)
        for payload in fleet.frames():
            for channel in ("up", "blk", "ack", "get", "info"):
                assert monitor.publish(own(VICTIM, channel), payload)
        monitor.settle()
        assert client.publish(own(MALLORY, "get"), b"\xc0")
        assert monitor.publish(own(MALLORY, "ack"), b"the end")
        fleet.wait_until("the end", lambda: any(one.payload == b"the end" for one in client.received))
        topics = {message.topic for message in client.received}
        assert shared("head") in topics
        for _ in filters:
            yield not topics <= allowed


@attack(
    "a head manifest that is changed, or signed for another channel or fleet",
    stopped_by="device",
    counted=REFUSED_SIGNATURES,
)
def forged_heads(fleet: AttackedFleet) -> Iterator[bool]:
    """The aggregator's own manifest with a byte changed, of another channel, or of another fleet."""
    payload = fleet.published("head")[-1]
    signed, manifest = fleet.head_manifest()
    at = payload.index(signed.body) + signed.body.index(manifest.current.head.digest)
    changed = payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
    other_fleet = signed_manifest(
        signed.body, key=fleet.aggregator_key(), fleet="vineyard", channel="head", release=2**40
    )
    other_channel = fleet.published("task")[-1]
    publications = [(shared("head"), each) for each in (changed, other_fleet, other_channel)]
    yield from publish_to_broker(fleet, publications)
    yield from refused_by_devices(fleet, publications, reason="signature")
    fleet.restore("head")
