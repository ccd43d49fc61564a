"""Attacks by topics: publishing and subscribing to other clients' topics, and replaying valid frames and manifests."""

import os
import time
from collections.abc import Iterable, Iterator

import msgspec

from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import Presence, Receipt
from protocol.wire.signing import sign_frame, sign_presence
from protocol.wire.topics import FleetChannel
from tests.support.fleets.closed_fleet import FLEET
from tests.support.messages.manifests import signed_manifest
from tests.support.messages.submissions import device_info
from tests.system.attacks.attacker_client import TIMEOUT_S, TrafficMonitor
from tests.system.attacks.fleet import HONEST, MALLORY, REVOKED, AttackedFleet, attack, frame_of, own, shared

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


@attack(
    "uploading another device's frames",
    stopped_by="aggregator",
    counted=(("signature", MALLORY), ("signature", VICTIM)),
)
def frames_of_others(fleet: AttackedFleet) -> Iterator[bool]:
    """Recorded ones under its own name, unchanged and with its own key; and changed ones under the other's name."""
    recorded = frame_of(fleet.frames()[0])
    own_key = frame_of(fleet.upload_of(b"any")[0]).key
    with_own_key = encode(msgspec.structs.replace(recorded, key=own_key))
    with fleet.client_of() as client:
        for payload in (*fleet.frames(), with_own_key):
            with fleet.counted("signature", MALLORY):
                assert client.publish(own(MALLORY, "up"), payload)
            yield False
    other = digest_of(b"another digest")
    changed = [
        msgspec.structs.replace(recorded, digest=other),
        msgspec.structs.replace(recorded, size_bytes=recorded.size_bytes + 1),
        msgspec.structs.replace(recorded, signature=b""),
        msgspec.structs.replace(recorded, digest=other, signature=bytes(64)),
        sign_frame(recorded, key=fleet.key(MALLORY), fleet=FLEET, device=VICTIM),
        sign_frame(recorded, key=fleet.key(VICTIM), fleet="vineyard", device=VICTIM),
    ]
    yield from fleet.refused_by_aggregator(map(encode, changed), VICTIM, reason="signature")


@attack(
    "replaying another device's submission under its name",
    stopped_by="broker, aggregator",
    counted=(("denied", MALLORY),),
)
def submission_of_others(fleet: AttackedFleet) -> Iterator[bool]:
    """The aggregator acknowledges what it has already, and nothing changes."""
    frames = [(own(VICTIM, "up"), payload) for payload in fleet.frames()]
    yield from publish_to_broker(fleet, frames, retain=False)
    with TrafficMonitor(fleet.open) as monitor:
        for topic, payload in frames:
            assert monitor.publish(topic, payload)
        fleet.wait_until("the receipt", lambda: monitor.payloads(own(VICTIM, "ack")))
        yield fleet.snapshot() != fleet.before


@attack(
    "uploading its own older submission after a newer one",
    stopped_by="aggregator",
    counted=(("superseded", MALLORY),),
)
def older_submission(fleet: AttackedFleet) -> Iterator[bool]:
    """The newer one counts, whatever arrives last."""
    submission = fleet.submission()
    newer, older = (
        fleet.upload_of(msgspec.structs.replace(submission, sequence=sequence)) for sequence in (2, 1)
    )
    with TrafficMonitor(fleet.open) as monitor, fleet.client_of() as client:
        for payload in newer:
            assert client.publish(own(MALLORY, "up"), payload)
        fleet.wait_until("the receipt", lambda: monitor.payloads(own(MALLORY, "ack")))
        accepted = fleet.submitted(MALLORY)
        assert accepted
        for _ in range(3):
            with fleet.counted("superseded", MALLORY):
                for payload in older:
                    assert client.publish(own(MALLORY, "up"), payload)
            yield fleet.submitted(MALLORY) != accepted


@attack(
    "replaying older signed tasks and heads",
    stopped_by="broker, device",
    counted=(("denied", MALLORY), *(("replayed", f"by {name}") for name in HONEST)),
)
def older_manifests(fleet: AttackedFleet) -> Iterator[bool]:
    """Manifests from before the aggregator's last start, and another one with a release that was used."""
    signed, _ = fleet.head_manifest()
    body = msgspec.msgpack.encode({"type": "head", "v": 1})
    same_release = signed_manifest(
        body, key=fleet.aggregator_key(), fleet=FLEET, channel="head", release=signed.release
    )
    task, head = fleet.published("task")[0], fleet.published("head")[0]
    assert task != fleet.published("task")[-1]
    assert head != fleet.published("head")[-1]
    replayed = [(shared("task"), task), (shared("head"), head), (shared("head"), same_release)]
    yield from publish_to_broker(fleet, replayed)
    yield from refused_by_devices(fleet, replayed, reason="replayed")
    fleet.restore("task")
    fleet.restore("head")


@attack(
    "connecting and uploading with a revoked device's folder",
    stopped_by="broker, aggregator",
    counted=(("no certificate", "?"), ("revoked", REVOKED)),
)
def revoked_folder(fleet: AttackedFleet) -> Iterator[bool]:
    """The broker refuses its certificate, and past the broker the aggregator refuses its key."""
    for _ in range(6):  # on a busy machine, mosquitto 2.0.11 does not log one in twelve of these refusals
        yield fleet.client_of(REVOKED).connect()
    frames = fleet.upload_of(msgspec.structs.replace(fleet.submission(), sequence=9), REVOKED)
    yield from fleet.refused_by_aggregator(frames[:1], REVOKED, reason="revoked")
    yield bool(fleet.submitted(REVOKED))
