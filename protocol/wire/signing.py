"""Ed25519 over exact bytes: what the aggregator tells its fleet, and which transfers are a device's own. No I/O.

What is signed begins with what it is for, so that no signature can stand for another purpose, fleet, topic or device.
"""

import functools

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.errors import BadSignature
from protocol.wire.codec import decode, encode
from protocol.wire.messages import MAX_SIGNED_BYTES, Frame, Signed
from protocol.wire.topics import FleetChannel


def public_key(key: bytes) -> bytes:
    """The 32 bytes by which others know a private key of 32 bytes."""
    return _public(key)


def sign_manifest(body: bytes, *, key: bytes, fleet: str, channel: FleetChannel, release: int) -> bytes:
    """A manifest's bytes as they are retained; `open_manifest` gives them back.

    Args:
        body: the manifest, encoded.
        key: the aggregator's private key, 32 bytes.
        fleet: whom it is for.
        channel: on which topic it stands, and on no other.
        release: greater than that of whatever else was said there.
    """
    said = _manifest(body, fleet=fleet, channel=channel, release=release)
    signature = _private(key).sign(said)
    return encode(Signed(key=public_key(key), release=release, signature=signature, body=body))


def open_manifest(payload: bytes, *, fleet: str, channel: FleetChannel) -> Signed:
    """What has been said on a topic, once its signature is found right; whose key it is, is the caller's to look at.

    Raises:
        MalformedMessage: the payload is no signed message.
        BadSignature: it is not what the key has signed for this fleet and topic.
    """
    signed = decode(payload, Signed, max_bytes=MAX_SIGNED_BYTES)
    said = _manifest(signed.body, fleet=fleet, channel=channel, release=signed.release)
    if not _verify(signed.key, signed.signature, said):
        raise BadSignature(f"the {channel} is not signed by the key {signed.key.hex()[:16]} that it names")
    return signed


def sign_transfer(key: bytes, *, fleet: str, device: str, digest: bytes, size_bytes: int) -> bytes:
    """The 64 bytes that every frame of a device's transfer carries.

    Args:
        key: the device's private key, 32 bytes.
        fleet: where it is sent.
        device: who sends it.
        digest: sha256 of the whole.
        size_bytes: of the whole.
    """
    return _word_on(key, _transfer(fleet, device, digest, size_bytes))


def sign_frame(frame: Frame, *, key: bytes, fleet: str, device: str) -> Frame:
    """A frame of a device's transfer as it travels: with the device's public key and its word on the transfer."""
    signature = sign_transfer(
        key, fleet=fleet, device=device, digest=frame.digest, size_bytes=frame.size_bytes
    )
    return msgspec.structs.replace(frame, key=public_key(key), signature=signature)


def is_own_transfer(
    public: bytes, signature: bytes, *, fleet: str, device: str, digest: bytes, size_bytes: int
) -> bool:
    """Whether a transfer is signed by the device whose public key (32 bytes) this is."""
    return _verify(public, signature, _transfer(fleet, device, digest, size_bytes))


def _manifest(body: bytes, *, fleet: str, channel: str, release: int) -> bytes:
    return f"protofleet 1 manifest {fleet} {channel} {release}\n".encode() + body


def _transfer(fleet: str, device: str, digest: bytes, size_bytes: int) -> bytes:
    return f"protofleet 1 transfer {fleet} {device} {size_bytes}\n".encode() + digest


@functools.lru_cache(maxsize=16)
def _private(key: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(key)


@functools.lru_cache(maxsize=16)
def _public(key: bytes) -> bytes:
    return _private(key).public_key().public_bytes_raw()


@functools.lru_cache(maxsize=16)
def _word_on(key: bytes, transfer: bytes) -> bytes:
    """A signature, made once for all frames of a transfer."""
    return _private(key).sign(transfer)


def _verify(public: bytes, signature: bytes, said: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, said)
    except (InvalidSignature, ValueError):
        return False
    return True
