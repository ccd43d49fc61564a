"""Attacks with genuine frames and manifests, of other devices and of earlier times."""

from collections.abc import Iterator

import msgspec

from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import Frame, Submission
from protocol.wire.signing import sign_frame, sign_manifest
from protocol.wire.transfer import frames_of
from tests.support.closed_fleet import FLEET
from tests.system.attacks.catalogue import attack
from tests.system.attacks.fleet import HONEST, HOSTILE, REVOKED, AttackedFleet, frame_of, own, shared
from tests.system.attacks.hostile import Witness
from tests.system.attacks.topics import through_broker, until_counted

VICTIM = HONEST[0]


@attack(
    "uploading another device's frames",
    stopped_by="aggregator",
    seen=(("signature", HOSTILE), ("signature", VICTIM)),
)
def frames_of_others(fleet: AttackedFleet) -> Iterator[bool]:
    """Captured ones under its own name, as they are and with its own key; and changed ones under the other's."""
    captured = [frame_of(payload) for payload in fleet.frames()]
    mine = msgspec.structs.replace(captured[0], key=frame_of(fleet.forged_frame(HOSTILE, signer=HOSTILE)).key)
    with fleet.mallory() as mallory:
        for payload in (*fleet.frames(), encode(mine)):
            with fleet.counted("signature", HOSTILE):
                assert mallory.publish(own(HOSTILE, "up"), payload)
            yield False
    other = digest_of(b"another digest")
    changed = [
        msgspec.structs.replace(captured[0], digest=other),
        msgspec.structs.replace(captured[0], size_bytes=captured[0].size_bytes + 1),
        msgspec.structs.replace(captured[0], signature=b""),
        msgspec.structs.replace(captured[0], digest=other, signature=bytes(64)),
        sign_frame(captured[0], key=fleet.key(HOSTILE), fleet=FLEET, device=VICTIM),
        sign_frame(captured[0], key=fleet.key(VICTIM), fleet="vineyard", device=VICTIM),
    ]
    yield from fleet.refused_inside([(VICTIM, encode(frame)) for frame in changed], reason="signature")


@attack(
    "uploading another device's submission again, under its name",
    stopped_by="broker, aggregator",
    seen=(("denied", HOSTILE),),
)
def again(fleet: AttackedFleet) -> Iterator[bool]:
    """The aggregator acknowledges what it has already, and nothing changes."""
    yield from through_broker(
        fleet, [(own(VICTIM, "up"), payload) for payload in fleet.frames()], retain=False
    )
    with Witness(fleet.open) as witness:
        for payload in fleet.frames():
            assert witness.publish(own(VICTIM, "up"), payload)
        fleet.wait_until("the receipt", lambda: witness.said(own(VICTIM, "ack")))
        yield fleet.snapshot() != fleet.before


@attack(
    "its own older submission, after a newer one", stopped_by="aggregator", seen=(("superseded", HOSTILE),)
)
def older_submission(fleet: AttackedFleet) -> Iterator[bool]:
    """The newer one counts, whatever arrives last."""
    submission = fleet.submission()
    newer, older = (upload(fleet, msgspec.structs.replace(submission, sequence=number)) for number in (2, 1))
    with Witness(fleet.open) as witness, fleet.mallory() as mallory:
        for payload in newer:
            assert mallory.publish(own(HOSTILE, "up"), payload)
        fleet.wait_until("the receipt", lambda: witness.said(own(HOSTILE, "ack")))
        stands = fleet.submitted(HOSTILE)
        assert stands
        for _ in range(3):
            with fleet.counted("superseded", HOSTILE):
                for payload in older:
                    assert mallory.publish(own(HOSTILE, "up"), payload)
            yield fleet.submitted(HOSTILE) != stands


def upload(fleet: AttackedFleet, submission: Submission, *, device: str = HOSTILE) -> list[bytes]:
    """Return the frames of a device's submission."""
    payload = encode(submission)
    frames: list[Frame] = list(frames_of(payload, digest=digest_of(payload)))
    return [encode(sign_frame(each, key=fleet.key(device), fleet=FLEET, device=device)) for each in frames]


@attack(
    "an older task and an older head, genuine ones",
    stopped_by="broker, device",
    seen=(("denied", HOSTILE), *(("replayed", f"by {name}") for name in HONEST)),
)
def older_manifests(fleet: AttackedFleet) -> Iterator[bool]:
    """Manifests from before the aggregator's last start, and another one with a release that was used."""
    signed, _ = fleet.head_manifest()
    changed = msgspec.msgpack.encode({"type": "head", "v": 1})
    same = sign_manifest(
        changed, key=fleet.aggregator_key(), fleet=FLEET, channel="head", release=signed.release
    )
    task, head = fleet.published("task")[0], fleet.published("head")[0]
    assert task != fleet.published("task")[-1]
    assert head != fleet.published("head")[-1]
    lies = [(shared("task"), task), (shared("head"), head), (shared("head"), same)]
    yield from through_broker(fleet, lies)
    yield from until_counted(fleet, lies, by=HONEST, reason="replayed")
    fleet.restore("task")
    fleet.restore("head")


@attack(
    "a stolen folder of a device that was revoked",
    stopped_by="broker, aggregator",
    seen=(("no certificate", "?"), ("revoked", REVOKED)),
)
def revoked_folder(fleet: AttackedFleet) -> Iterator[bool]:
    """The broker refuses its certificate, and past the broker the aggregator refuses its key."""
    for _ in range(2):
        yield fleet.client_of(REVOKED).connect()
    payload = encode(msgspec.structs.replace(fleet.submission(), sequence=9))
    frame = next(frames_of(payload, digest=digest_of(payload)))
    signed = encode(sign_frame(frame, key=fleet.key(REVOKED), fleet=FLEET, device=REVOKED))
    yield from fleet.refused_inside([(REVOKED, signed)], reason="revoked")
    yield bool(fleet.submitted(REVOKED))
