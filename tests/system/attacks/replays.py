"""Attacks with what is genuine: frames and manifests of others, and of another time."""

from collections.abc import Iterator

import msgspec

from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import Frame, Submission
from protocol.wire.signing import sign_frame, sign_manifest
from protocol.wire.transfer import frames_of
from tests.support.closed_fleet import FLEET
from tests.system.attacks.catalogue import attack
from tests.system.attacks.ground import HONEST, HOSTILE, REVOKED, Ground, frame_of, own, shared
from tests.system.attacks.hostile import Witness
from tests.system.attacks.topics import at_the_door, until_counted

VICTIM = HONEST[0]


@attack(
    "uploading another device's frames",
    stopped_by="aggregator",
    seen=(("signature", HOSTILE), ("signature", VICTIM)),
)
def frames_of_others(ground: Ground) -> Iterator[bool]:
    """Captured ones under its own name, as they are and with its own key; and changed ones under the other's."""
    captured = [frame_of(payload) for payload in ground.frames()]
    mine = msgspec.structs.replace(
        captured[0], key=frame_of(ground.forged_frame(HOSTILE, signer=HOSTILE)).key
    )
    with ground.mallory() as mallory:
        for payload in (*ground.frames(), encode(mine)):
            with ground.counted("signature", HOSTILE):
                assert mallory.publish(own(HOSTILE, "up"), payload)
            yield False
    other = digest_of(b"another digest")
    changed = [
        msgspec.structs.replace(captured[0], digest=other),
        msgspec.structs.replace(captured[0], size_bytes=captured[0].size_bytes + 1),
        msgspec.structs.replace(captured[0], signature=b""),
        msgspec.structs.replace(captured[0], digest=other, signature=bytes(64)),
        sign_frame(captured[0], key=ground.key(HOSTILE), fleet=FLEET, device=VICTIM),
        sign_frame(captured[0], key=ground.key(VICTIM), fleet="vineyard", device=VICTIM),
    ]
    yield from ground.refused_inside([(VICTIM, encode(frame)) for frame in changed], reason="signature")


@attack(
    "uploading another device's submission again, under its name",
    stopped_by="broker, aggregator",
    seen=(("denied", HOSTILE),),
)
def again(ground: Ground) -> Iterator[bool]:
    """What the aggregator has already is said to be received, and changes nothing."""
    yield from at_the_door(
        ground, [(own(VICTIM, "up"), payload) for payload in ground.frames()], retain=False
    )
    with Witness(ground.open) as witness:
        for payload in ground.frames():
            assert witness.publish(own(VICTIM, "up"), payload)
        ground.until("the receipt", lambda: witness.said(own(VICTIM, "ack")))
        yield ground.stand() != ground.standing


@attack(
    "its own older submission, after a newer one", stopped_by="aggregator", seen=(("superseded", HOSTILE),)
)
def older_submission(ground: Ground) -> Iterator[bool]:
    """The newer one stands, whatever comes last."""
    submission = ground.submission()
    newer, older = (upload(ground, msgspec.structs.replace(submission, sequence=number)) for number in (2, 1))
    with Witness(ground.open) as witness, ground.mallory() as mallory:
        for payload in newer:
            assert mallory.publish(own(HOSTILE, "up"), payload)
        ground.until("the receipt", lambda: witness.said(own(HOSTILE, "ack")))
        stands = ground.submitted(HOSTILE)
        assert stands
        for _ in range(3):
            with ground.counted("superseded", HOSTILE):
                for payload in older:
                    assert mallory.publish(own(HOSTILE, "up"), payload)
            yield ground.submitted(HOSTILE) != stands


def upload(ground: Ground, submission: Submission, *, device: str = HOSTILE) -> list[bytes]:
    """The frames with which a device hands a submission in."""
    payload = encode(submission)
    frames: list[Frame] = list(frames_of(payload, digest=digest_of(payload)))
    return [encode(sign_frame(each, key=ground.key(device), fleet=FLEET, device=device)) for each in frames]


@attack(
    "an older task and an older head, genuine ones",
    stopped_by="broker, device",
    seen=(("denied", HOSTILE), *(("replayed", f"by {name}") for name in HONEST)),
)
def older_manifests(ground: Ground) -> Iterator[bool]:
    """What the aggregator has said before it last started, and another word under a release that was used."""
    signed, _ = ground.head_manifest()
    changed = msgspec.msgpack.encode({"type": "head", "v": 1})
    same = sign_manifest(
        changed, key=ground.aggregators_key(), fleet=FLEET, channel="head", release=signed.release
    )
    task, head = ground.told("task")[0], ground.told("head")[0]
    assert task != ground.told("task")[-1]
    assert head != ground.told("head")[-1]
    lies = [(shared("task"), task), (shared("head"), head), (shared("head"), same)]
    yield from at_the_door(ground, lies)
    yield from until_counted(ground, lies, by=HONEST, reason="replayed")
    ground.restore("task")
    ground.restore("head")


@attack(
    "a stolen folder of a device that was revoked",
    stopped_by="broker, aggregator",
    seen=(("no certificate", "?"), ("revoked", REVOKED)),
)
def revoked_folder(ground: Ground) -> Iterator[bool]:
    """Its certificate lets nobody in, and behind the broker its key counts no more."""
    for _ in range(2):
        yield ground.client_of(REVOKED).connect()
    payload = encode(msgspec.structs.replace(ground.submission(), sequence=9))
    frame = next(frames_of(payload, digest=digest_of(payload)))
    signed = encode(sign_frame(frame, key=ground.key(REVOKED), fleet=FLEET, device=REVOKED))
    yield from ground.refused_inside([(REVOKED, signed)], reason="revoked")
    yield bool(ground.submitted(REVOKED))
