"""Vectors of signatures, and of manifests that a device trusts or refuses."""

from collections.abc import Sequence
from typing import Any

import msgspec

from edge_client.core.manifest_trust import ManifestTrust, UntrustedManifest, expired, verify
from protocol.errors import BadSignature, MalformedMessage
from protocol.wire import signing
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import Frame, KeyCertificate, Presence, PrivacyRecord, Released, Signed
from protocol.wire.topics import FleetChannel, device_topic, fleet_topic

FLEET, DEVICE = "shed", "phone-1"
ISSUED_S, EXPIRES_S = 1_700_000_000, 1_702_592_000
KEYS = {
    name: digest_of(f"private key {name}".encode()) for name in ("first", "second", "third", "root", "device")
}
PUBLIC = {name: signing.public_key(key) for name, key in KEYS.items()}
BODY = b"any bytes"

_Step = dict[str, Any]


def vectors() -> dict[str, Any]:
    """Return what is signed for each purpose, its signature, and whether others are valid."""
    return {
        "about": "Ed25519 is deterministic: `private_key` gives `signature` of `signed`. Of `others`, each is for "
        "another fleet, topic, device or key, or was changed. `manifests` and `certificates` verify with the key that "
        "they name.",
        "keys": [
            {"name": name, "private_key": key.hex(), "public_key": PUBLIC[name].hex()}
            for name, key in KEYS.items()
        ],
        "transfers": _transfers(),
        "presences": _presences(),
        "records": _records(),
        "certificates": _certificates(),
        "manifests": _manifests(),
    }


def _transfers() -> list[_Step]:
    frame = Frame(v=1, digest=digest_of(BODY), size_bytes=len(BODY), offset=0, data=BODY)
    signed = signing.sign_frame(frame, key=KEYS["device"], fleet=FLEET, device=DEVICE)
    names: tuple[tuple[str, str, bytes, int, str], ...] = (
        (FLEET, DEVICE, signed.digest, signed.size_bytes, "device"),
        ("other", DEVICE, signed.digest, signed.size_bytes, "device"),
        (FLEET, "phone-2", signed.digest, signed.size_bytes, "device"),
        (FLEET, DEVICE, digest_of(b"other"), signed.size_bytes, "device"),
        (FLEET, DEVICE, signed.digest, signed.size_bytes + 1, "device"),
        (FLEET, DEVICE, signed.digest, signed.size_bytes, "first"),
    )
    return [
        {
            "fleet": fleet,
            "device": device,
            "digest": digest.hex(),
            "size_bytes": size,
            "key": PUBLIC[key].hex(),
            "signed": (f"protofleet 1 transfer {fleet} {device} {size}\n".encode() + digest).hex(),
            "signature": signed.signature.hex(),
            "valid": signing.is_own_transfer(
                PUBLIC[key], signed.signature, fleet=fleet, device=device, digest=digest, size_bytes=size
            ),
        }
        for fleet, device, digest, size, key in names
    ]


def _presences() -> list[_Step]:
    own = device_topic(FLEET, DEVICE, "state")
    online = Presence(state="online", epoch=ISSUED_S, instance=bytes(range(16)), address="pi/192.0.2.7")
    bare = Presence(state="offline", epoch=0)
    named = Presence(state="stopped", epoch=2**53 - 1, instance=b"\x01", address="Gerät\n1")
    cases = [
        *(
            (signing.sign_presence(each, key=KEYS["device"], topic=own), own, "device")
            for each in (online, bare, named)
        ),
        (signing.sign_presence(online, key=KEYS["first"], topic=fleet_topic(FLEET, "state")), "", "first"),
    ]
    cases = [(each, topic or fleet_topic(FLEET, "state"), key) for each, topic, key in cases]
    first = cases[0][0]
    replaced = msgspec.structs.replace
    cases += [
        (replaced(first, state="offline"), own, "device"),
        (replaced(first, epoch=ISSUED_S + 1), own, "device"),
        (replaced(first, address=""), own, "device"),
        (first, device_topic(FLEET, "phone-2", "state"), "device"),
        (first, own, "second"),
        (replaced(first, key=PUBLIC["second"]), own, "second"),
        (replaced(first, signature=b""), own, "device"),
    ]
    return [
        {
            "topic": topic,
            "bytes": encode(each).hex(),
            "key": PUBLIC[key].hex(),
            "signed": _of_presence(each, topic).hex(),
            "valid": signing.is_own_presence(each, public=PUBLIC[key], topic=topic),
        }
        for each, topic, key in cases
    ]


def _of_presence(each: Presence, topic: str) -> bytes:
    fields = f"{each.state} {each.epoch} {each.instance.hex()} {each.address}"
    return f"protofleet 1 presence {topic} {fields}".encode()


def _records() -> list[_Step]:
    topic = device_topic(FLEET, DEVICE, "get")
    record = PrivacyRecord(releases=(Released(2.0, 1, 300), Released(3.5, 6, 1, 4)))
    releases = msgspec.msgpack.encode([[2.0, 1, 300, 0], [3.5, 6, 1, 4]])
    signed = signing.sign_record(record, key=KEYS["device"], topic=topic)
    return [
        {
            "topic": each,
            "bytes": encode(signed).hex(),
            "key": PUBLIC["device"].hex(),
            "signed": (f"protofleet 1 privacy record {each}\n".encode() + releases).hex(),
            "valid": signing.is_own_record(signed, public=PUBLIC["device"], topic=each),
        }
        for each in (topic, device_topic(FLEET, DEVICE, "ack"))
    ]


def _certificate(key: str, number: int, *, signer: str, root: str = "", fleet: str = FLEET) -> KeyCertificate:
    public_root = PUBLIC[root] if root else b""
    return signing.sign_key_certificate(
        PUBLIC[key], number=number, root=public_root, fleet=fleet, signer=KEYS[signer]
    )


def _certificates() -> list[_Step]:
    with_root = _certificate("second", 2, signer="first", root="root")
    cases = [
        (with_root, FLEET),
        (_certificate("second", 2, signer="first"), FLEET),
        (with_root, "other"),
        (msgspec.structs.replace(with_root, number=3), FLEET),
        (msgspec.structs.replace(with_root, root=b""), FLEET),
        (msgspec.structs.replace(with_root, signer=PUBLIC["root"]), FLEET),
    ]
    return [
        {
            "fleet": fleet,
            "fields": each,
            "signed": _of_certificate(each, fleet).hex(),
            "valid": signing.is_valid_certificate(each, fleet=fleet),
        }
        for each, fleet in cases
    ]


def _of_certificate(each: KeyCertificate, fleet: str) -> bytes:
    return f"protofleet 1 key {fleet} {each.number} {each.key.hex()} {each.root.hex()}".encode()


def manifest(
    release: int,
    body: bytes = BODY,
    *,
    key: str = "first",
    channel: FleetChannel = "task",
    certificates: Sequence[KeyCertificate] = (),
    expires_s: int = EXPIRES_S,
    fleet: str = FLEET,
) -> bytes:
    """Return a signed manifest."""
    return signing.sign_manifest(
        body,
        key=KEYS[key],
        fleet=fleet,
        channel=channel,
        release=release,
        issued_s=ISSUED_S + release,
        expires_s=expires_s,
        certificates=tuple(certificates),
    )


def opened(payload: bytes, fleet: str, channel: FleetChannel) -> str:
    """Return why a manifest is refused before its key is trusted; empty if it is not."""
    try:
        signing.open_manifest(payload, fleet=fleet, channel=channel)
    except BadSignature:
        return "signature"
    except MalformedMessage:
        return "malformed"
    return ""


def _manifests() -> list[_Step]:
    valid = manifest(5)
    changed = msgspec.structs.replace(msgspec.msgpack.decode(valid, type=Signed), body=b"other byte")
    foreign = _certificate("second", 2, signer="first", fleet="other")
    cases: list[tuple[str, bytes, str, FleetChannel]] = [
        ("valid", valid, FLEET, "task"),
        ("with a certificate", _rotated(), FLEET, "task"),
        ("of another channel", valid, FLEET, "head"),
        ("of another fleet", valid, "other", "task"),
        ("with another body", encode(changed), FLEET, "task"),
        (
            "with another release",
            encode(msgspec.structs.replace(changed, body=BODY, release=6)),
            FLEET,
            "task",
        ),
        (
            "signed by another key",
            encode(msgspec.structs.replace(changed, key=PUBLIC["second"])),
            FLEET,
            "task",
        ),
        ("with an invalid certificate", manifest(5, key="second", certificates=[foreign]), FLEET, "task"),
        ("cut", valid[:-1], FLEET, "task"),
    ]
    return [
        {
            "name": name,
            "fleet": fleet,
            "channel": channel,
            "bytes": payload.hex(),
            "refused": opened(payload, fleet, channel),
        }
        for name, payload, fleet, channel in cases
    ]


def _rotated(release: int = 1) -> bytes:
    return manifest(release, key="second", certificates=[_certificate("second", 2, signer="first")])


def trust() -> dict[str, Any]:
    """Return sequences of manifests with the verdicts of a device that starts anew in each."""
    by_root = [
        _certificate("second", 2, signer="first", root="root"),
        _certificate("third", 3, signer="root", root="root"),
    ]
    configured = ManifestTrust(key=PUBLIC["first"])
    rooted = ManifestTrust(key=PUBLIC["first"], number=1, root=PUBLIC["root"])
    other = b"another body"
    return {
        "about": "A device with the trust `start` receives the manifests of `steps`, in this order. `refused` is the "
        "reason, empty if it is accepted. `trust` is the trust after it: `seen` has the highest release of each "
        "channel.",
        "fleet": FLEET,
        "sequences": [
            _sequence("the first key is trusted", [manifest(5), manifest(6)]),
            _sequence("another key is refused", [manifest(5), manifest(6, key="second"), manifest(6)]),
            _sequence("a lower release is refused", [manifest(5), manifest(4), manifest(5), manifest(7)]),
            _sequence("the same release with another body is refused", [manifest(5), manifest(5, other)]),
            _sequence(
                "the same release and body change nothing",
                [manifest(5), manifest(5, expires_s=EXPIRES_S + 9)],
            ),
            _sequence(
                "each channel counts its releases",
                [manifest(5), manifest(1, channel="head"), manifest(4)],
                channels=["task", "head", "task"],
            ),
            _sequence(
                "a configured key: another one is refused first",
                [manifest(9, key="second"), manifest(1)],
                configured,
            ),
            _sequence(
                "an invalid signature changes nothing",
                [manifest(5, fleet="other"), manifest(1, key="second")],
            ),
            _sequence(
                "a certificate of the trusted key leads to another", [manifest(5), _rotated(), manifest(6)]
            ),
            _sequence(
                "releases count anew with another key",
                [manifest(900), _rotated(1), _rotated(1), manifest(1, b"other", key="second")],
            ),
            _sequence(
                "another key forgets releases, not when a manifest ends",
                [manifest(5, channel="head"), _rotated(1)],
                channels=["head", "task"],
            ),
            _sequence(
                "a certificate of an untrusted key does not count",
                [
                    manifest(5),
                    manifest(6, key="second", certificates=[_certificate("second", 2, signer="third")]),
                ],
            ),
            _sequence(
                "with a root, it alone counts: a chain",
                [manifest(5), manifest(1, key="third", certificates=by_root[::-1])],
            ),
            _sequence(
                "with a root, the previous key's certificate does not count",
                [
                    manifest(5),
                    manifest(6, key="second", certificates=[_certificate("second", 2, signer="first")]),
                ],
                rooted,
            ),
            _sequence(
                "a lower number does not count",
                [
                    manifest(1, key="third", certificates=by_root),
                    manifest(
                        99, key="second", certificates=[_certificate("second", 2, signer="root", root="root")]
                    ),
                ],
            ),
            _sequence(
                "certificates count although the manifest is replayed",
                [
                    manifest(5),
                    manifest(4, certificates=[_certificate("first", 2, signer="first", root="root")]),
                    manifest(1, key="third", certificates=by_root[1:]),
                ],
            ),
            _sequence(
                "a first manifest gives number and root",
                [
                    manifest(1, key="second", certificates=by_root[:1]),
                    manifest(1, key="third", certificates=[_certificate("third", 3, signer="second")]),
                    manifest(1, key="third", certificates=by_root),
                ],
            ),
        ],
        "expiry": [
            {"expires_s": EXPIRES_S, "now_s": now_s, "expired": bool(expired(accepted, now_s=now_s))}
            for accepted in [received(manifest(5), "task", ManifestTrust())[1]]
            for now_s in (EXPIRES_S - 1, EXPIRES_S, EXPIRES_S + 1)
        ],
    }


def _sequence(
    name: str,
    payloads: Sequence[bytes],
    start: ManifestTrust | None = None,
    *,
    channels: Sequence[FleetChannel] = (),
) -> dict[str, Any]:
    trusted, steps = start or ManifestTrust(), []
    for number, payload in enumerate(payloads):
        channel = channels[number] if channels else "task"
        reason, trusted = received(payload, channel, trusted)
        steps.append(
            {"channel": channel, "bytes": payload.hex(), "refused": reason, "trust": _shown(trusted)}
        )
    return {"name": name, "start": _shown(start or ManifestTrust()), "steps": steps}


def received(
    payload: bytes, channel: FleetChannel, trusted: ManifestTrust, *, fleet: str = FLEET
) -> tuple[str, ManifestTrust]:
    """Return why a manifest is refused, empty if it is not, and the trust after it."""
    if reason := opened(payload, fleet, channel):
        return reason, trusted
    try:
        signed = signing.open_manifest(payload, fleet=fleet, channel=channel)
        return "", verify(trusted, channel, signed)
    except UntrustedManifest as error:
        return error.reason, error.trust


def _shown(trusted: ManifestTrust) -> dict[str, Any]:
    return {
        "key": trusted.key and trusted.key.hex(),
        "number": trusted.number,
        "root": trusted.root and trusted.root.hex(),
        "seen": {channel: release for channel, (release, _) in trusted.seen.items()},
        "expires_s": trusted.expires_s,
        "issued_s": trusted.issued_s,
    }
