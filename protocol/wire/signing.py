"""Ed25519 signatures of the aggregator's manifests, of the devices' transfers, and of presences. No I/O.

The signed bytes begin with their purpose, so that no signature is valid for another purpose, fleet, topic or device.
"""

import functools

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import UnsetType

from protocol.errors import BadSignature
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import (
    MAX_SIGNED_BYTES,
    Frame,
    KeyCertificate,
    Presence,
    PrivacyRecord,
    SealedMask,
    SecondOperator,
    Signed,
    SumReply,
)
from protocol.wire.topics import FleetChannel


@functools.lru_cache(maxsize=16)
def public_key(key: bytes) -> bytes:
    """Return the public key of a private key, 32 bytes each."""
    return _private(key).public_key().public_bytes_raw()


def sign_manifest(
    body: bytes,
    *,
    key: bytes,
    fleet: str,
    channel: FleetChannel,
    release: int,
    issued_s: int,
    expires_s: int,
    certificates: tuple[KeyCertificate, ...],
) -> bytes:
    """Return an encoded manifest, signed with the aggregator's private key (32 bytes) for one fleet and topic.

    `release` is greater than that of every earlier message on the topic; times are in unix seconds; `certificates` lead
    from the aggregator's earlier keys to this one.
    """
    signed = Signed(
        key=public_key(key),
        release=release,
        issued_s=issued_s,
        expires_s=expires_s,
        signature=bytes(64),
        body=body,
        certificates=certificates,
    )
    signature = _private(key).sign(_manifest(signed, fleet=fleet, channel=channel))
    return encode(msgspec.structs.replace(signed, signature=signature))


def open_manifest(payload: bytes, *, fleet: str, channel: FleetChannel) -> Signed:
    """Verify a signed message with the key that it names; the caller decides whether to trust that key.

    Raises:
        MalformedMessage: the payload is not a signed message.
        BadSignature: the signature, or that of a certificate, is not valid for this fleet and topic.
    """
    signed = decode(payload, Signed, max_bytes=MAX_SIGNED_BYTES)
    content = _manifest(signed, fleet=fleet, channel=channel)
    if not _verify(signed.key, signed.signature, content):
        raise BadSignature(f"the {channel} is not signed by the key {signed.key.hex()[:16]} that it names")
    if not all(is_valid_certificate(each, fleet=fleet) for each in signed.certificates):
        raise BadSignature(
            f"the {channel} has a certificate of a key that is not signed by the key that it names"
        )
    return signed


def sign_key_certificate(
    public: bytes, *, number: int, root: bytes, fleet: str, signer: bytes
) -> KeyCertificate:
    """Return the certificate of an aggregator's key (32 bytes, public), signed with a private key (32 bytes).

    `number` is greater than that of every earlier key; `root` is the public key that signs all later ones, or empty.
    """
    certificate = KeyCertificate(
        number=number, key=public, root=root, signer=public_key(signer), signature=bytes(64)
    )
    signature = _private(signer).sign(_certificate(certificate, fleet))
    return msgspec.structs.replace(certificate, signature=signature)


def is_valid_certificate(certificate: KeyCertificate, *, fleet: str) -> bool:
    """Return whether a certificate is signed by the key that it names, for this fleet."""
    return _verify(certificate.signer, certificate.signature, _certificate(certificate, fleet))


def _certificate(certificate: KeyCertificate, fleet: str) -> bytes:
    keys = f"{certificate.key.hex()} {certificate.root.hex()}"
    return f"protofleet 1 key {fleet} {certificate.number} {keys}".encode()


def sign_frame(frame: Frame, *, key: bytes, fleet: str, device: str) -> Frame:
    """Return a frame with the public key and the signature of its transfer, by the device's private key (32 bytes)."""
    signature = _sign_transfer(key, _transfer(fleet, device, frame.digest, frame.size_bytes))
    return msgspec.structs.replace(frame, key=public_key(key), signature=signature)


def is_own_transfer(
    public: bytes, signature: bytes, *, fleet: str, device: str, digest: bytes, size_bytes: int
) -> bool:
    """Return whether a transfer is signed with the key whose public part (32 bytes) is given."""
    return _verify(public, signature, _transfer(fleet, device, digest, size_bytes))


def sign_mask(mask: SealedMask, *, key: bytes, context: bytes) -> SealedMask:
    """Return a mask with the public key and the signature of a device's private key (32 bytes), for one submission."""
    named = msgspec.structs.replace(mask, key=public_key(key))
    return msgspec.structs.replace(named, signature=_private(key).sign(_mask(named, context)))


def is_own_mask(mask: SealedMask, *, context: bytes) -> bool:
    """Return whether a mask is signed with the key that it names, for this submission."""
    return _verify(mask.key, mask.signature, _mask(mask, context))


def sign_seal_key(seal_key: bytes, *, key: bytes) -> bytes:
    """Return the signature of a task's seal key (32 bytes, public) by the second operator's private key (32 bytes)."""
    return _private(key).sign(_seal_key(seal_key))


def is_own_seal_key(operator: SecondOperator) -> bool:
    """Return whether a task's seal key is signed with the second operator's key."""
    return _verify(operator.sign_key, operator.seal_key_signature, _seal_key(operator.seal_key))


def sign_sum(reply: SumReply, *, key: bytes, fleet: str) -> SumReply:
    """Return a sum of masks, or a refusal, with the signature of the second operator's private key (32 bytes)."""
    return msgspec.structs.replace(reply, signature=_private(key).sign(_sum(reply, fleet)))


def is_own_sum(reply: SumReply, *, public: bytes, fleet: str) -> bool:
    """Return whether a sum or a refusal is signed with the key whose public part (32 bytes) is given."""
    return _verify(public, reply.signature, _sum(reply, fleet))


def sign_presence(presence: Presence, *, key: bytes, topic: str) -> Presence:
    """Return a presence with the public key and the signature of a private key (32 bytes), for one topic."""
    signature = _private(key).sign(_presence(presence, topic))
    return msgspec.structs.replace(presence, key=public_key(key), signature=signature)


def is_own_presence(presence: Presence, *, public: bytes, topic: str) -> bool:
    """Return whether a presence is signed with the key whose public part (32 bytes) is given, for this topic."""
    return presence.key == public and _verify(public, presence.signature, _presence(presence, topic))


def sign_record(record: PrivacyRecord, *, key: bytes, topic: str) -> PrivacyRecord:
    """Return a record with the public key and the signature of a private key (32 bytes), for one topic."""
    signature = _private(key).sign(_record(record, topic))
    return msgspec.structs.replace(record, key=public_key(key), signature=signature)


def is_own_record(record: PrivacyRecord, *, public: bytes, topic: str) -> bool:
    """Return whether a record is signed with the key whose public part (32 bytes) is given, for this topic."""
    return record.key == public and _verify(public, record.signature, _record(record, topic))


def sign_joined(answer: str, *, key: bytes) -> bytes:
    """Return the aggregator's signature of the text of a `JoinAnswer`."""
    return _private(key).sign(_joined(answer))


def is_joined(answer: str, signature: bytes, *, public: bytes) -> bool:
    return _verify(public, signature, _joined(answer))


def sign_connection(challenge: str, *, key: bytes, fleet: str, device: str) -> bytes:
    """Return a device's signature with which it connects through the gateway; the challenge is hex."""
    return _private(key).sign(_connection(challenge, fleet, device))


def is_own_connection(challenge: str, signature: bytes, *, public: bytes, fleet: str, device: str) -> bool:
    return _verify(public, signature, _connection(challenge, fleet, device))


def _joined(answer: str) -> bytes:
    return f"protofleet 1 joined\n{answer}".encode()


def _connection(challenge: str, fleet: str, device: str) -> bytes:
    return f"protofleet 1 connect {fleet} {device} {challenge}".encode()


def _mask(mask: SealedMask, context: bytes) -> bytes:
    return b"protofleet 1 sealed mask %d\n" % mask.min_devices + context + b"\n" + mask.sealed


def _seal_key(seal_key: bytes) -> bytes:
    return f"protofleet 1 seal key {seal_key.hex()}".encode()


def _sum(reply: SumReply, fleet: str) -> bytes:
    if isinstance(reply.masks, UnsetType):
        return f"protofleet 1 no sum {fleet} {reply.request.hex()} {reply.problem}".encode()
    values = f"{reply.masks.dtype} {reply.masks.shape} {digest_of(reply.masks.data).hex()}"
    return f"protofleet 1 sum {fleet} {reply.request.hex()} {values}".encode()


def _record(record: PrivacyRecord, topic: str) -> bytes:
    return f"protofleet 1 privacy record {topic}\n".encode() + msgspec.msgpack.encode(record.releases)


def _presence(presence: Presence, topic: str) -> bytes:
    instance = presence.instance.hex()
    text = f"protofleet 1 presence {topic} {presence.state} {presence.epoch} {instance} {presence.address}"
    return text.encode()


def _manifest(signed: Signed, *, fleet: str, channel: str) -> bytes:
    numbers = f"{signed.release} {signed.issued_s} {signed.expires_s}"
    return f"protofleet 1 manifest {fleet} {channel} {numbers}\n".encode() + signed.body


def _transfer(fleet: str, device: str, digest: bytes, size_bytes: int) -> bytes:
    return f"protofleet 1 transfer {fleet} {device} {size_bytes}\n".encode() + digest


@functools.lru_cache(maxsize=16)
def _private(key: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(key)


@functools.lru_cache(maxsize=16)
def _sign_transfer(key: bytes, transfer: bytes) -> bytes:
    return _private(key).sign(transfer)


def _verify(public: bytes, signature: bytes, content: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True
