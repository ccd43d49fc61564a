"""Attacks with valid frames and manifests, of other devices and of earlier times."""

from collections.abc import Iterator

import msgspec

from protocol.wire.codec import digest_of, encode
from protocol.wire.signing import sign_frame
from tests.support.fleets.closed_fleet import FLEET
from tests.support.messages.manifests import signed_manifest
from tests.system.attacks.attacker_client import TrafficMonitor
from tests.system.attacks.fleet import HONEST, MALLORY, REVOKED, AttackedFleet, attack, frame_of, own, shared
from tests.system.attacks.topic_access import VICTIM, publish_to_broker, refused_by_devices


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
