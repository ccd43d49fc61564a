"""Masks of submissions: the aggregator adds masked values, and a second operator opens the sum of masks only. No I/O.

A value x is uploaded as x + m modulo 2^32, where m is the key stream of a seed of 256 random bits. The seed is sealed
for the second operator (X25519, HKDF-SHA256, ChaCha20-Poly1305 of RFC 7748, 5869 and 8439), bound to one submission.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from protocol.errors import BadSignature
from protocol.wire.messages import SealedMask
from protocol.wire.signing import sign_mask

SEED_BYTES = 32

_NONCE = bytes(12)
"""Of a key that is used once."""


def submission_context(*, fleet: str, task: bytes, device: str, sequence: int) -> bytes:
    """Return the bytes that bind a mask to one submission."""
    return f"protofleet 1 mask {fleet} {task.hex()} {device} {sequence}".encode()


def sealed_mask(
    seed: bytes, *, seal_key: bytes, min_devices: int, signing_key: bytes, context: bytes
) -> SealedMask:
    """Return the seed of a mask (32 random bytes), sealed for the second operator and signed by the device.

    The same arguments give the same bytes: the X25519 key that is used once is derived from the seed.
    """
    once = X25519PrivateKey.from_private_bytes(
        hashlib.sha256(b"protofleet 1 once " + seed + context).digest()
    )
    public = once.public_key().public_bytes_raw()
    shared = once.exchange(X25519PublicKey.from_public_bytes(seal_key))
    key = _key(shared, public, seal_key, context)
    sealed = public + ChaCha20Poly1305(key).encrypt(_NONCE, seed, context)
    mask = SealedMask(sealed=sealed, min_devices=min_devices, key=bytes(32), signature=bytes(64))
    return sign_mask(mask, key=signing_key, context=context)


def open_seed(mask: SealedMask, *, private_key: bytes, context: bytes) -> bytes:
    """Return the seed of a mask, by the second operator's private key (32 bytes).

    Raises:
        BadSignature: it was sealed for another key or another submission.
    """
    own = X25519PrivateKey.from_private_bytes(private_key)
    public, sealed = mask.sealed[:32], mask.sealed[32:]
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(public))
        key = _key(shared, public, own.public_key().public_bytes_raw(), context)
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, context)
    except (InvalidTag, ValueError) as error:
        raise BadSignature("a mask is not sealed for this key and submission") from error


def mask_of(seed: bytes, values: int) -> NDArray[np.uint32]:
    """Return the mask of a seed, uint32 (values,)."""
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(4 * values))
    return np.frombuffer(stream, "<u4")


def masked(parts: Sequence[NDArray[np.int32]], seed: bytes) -> list[NDArray[np.uint32]]:
    """Return the parts of one submission, in their order and shapes, plus the mask of a seed modulo 2^32."""
    mask = mask_of(seed, sum(part.size for part in parts))
    ends = np.cumsum([part.size for part in parts])[:-1]
    return [
        part.view(np.uint32) + own.reshape(part.shape)
        for part, own in zip(parts, np.split(mask, ends), strict=True)
    ]


def _key(shared: bytes, once: bytes, seal_key: bytes, context: bytes) -> bytes:
    return HKDF(hashes.SHA256(), length=32, salt=None, info=once + seal_key + context).derive(shared)
