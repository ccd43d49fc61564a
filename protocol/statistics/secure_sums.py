"""Masked submissions: the aggregator adds masked values, and a second operator opens the sum of masks only. No I/O.

A value x is uploaded as x + m modulo 2^32, where m is the key stream of a seed of 256 random bits. The masked values
are sealed to the aggregator, and the seed to the second operator, by HPKE (RFC 9180, base mode): DHKEM(X25519,
HKDF-SHA256), HKDF-SHA256, ChaCha20-Poly1305. What is sealed is bound to one submission.
"""

from collections.abc import Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from numpy.typing import NDArray

from protocol.errors import BadSignature
from protocol.wire.messages import SealedMask
from protocol.wire.signing import sign_mask

SEED_BYTES = 32

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


def submission_context(*, fleet: str, task: bytes, device: str, sequence: int, values: int) -> bytes:
    """Return the bytes that bind what is sealed, and a mask's signature, to one submission of so many values."""
    return f"protofleet 1 mask {fleet} {task.hex()} {device} {sequence} {values}".encode()


def sealed_mask(
    seed: bytes, *, seal_key: bytes, min_devices: int, signing_key: bytes, context: bytes
) -> SealedMask:
    """Return the seed of a mask (32 random bytes), sealed to the second operator and signed by the device."""
    sealed = _seal(seed, seal_key, context)
    mask = SealedMask(sealed=sealed, min_devices=min_devices, key=bytes(32), signature=bytes(64))
    return sign_mask(mask, key=signing_key, context=context)


def open_seed(mask: SealedMask, *, private_key: bytes, context: bytes) -> bytes:
    """Return the seed of a mask, by the second operator's private key (32 bytes).

    Raises:
        BadSignature: it was sealed for another key or another submission.
    """
    return _open(mask.sealed, private_key, context)


def sealed_values(parts: Sequence[NDArray[np.int32]], seed: bytes, *, key: bytes, context: bytes) -> bytes:
    """Return the parts of one submission, one after the other, masked and sealed to a public key (32 bytes).

    Masked are the values modulo 2^32, little-endian; another call gives other bytes.
    """
    values = np.concatenate([part.ravel() for part in parts]).view(np.uint32)
    return _seal((values + mask_of(seed, len(values))).astype("<u4").tobytes(), key, _VALUES + context)


def open_values(sealed: bytes, *, private_key: bytes, context: bytes) -> NDArray[np.uint32]:
    """Return the masked values of a submission, uint32 (values,), by the aggregator's private key (32 bytes).

    Raises:
        BadSignature: they were sealed for another key or another submission, or are no numbers of 4 bytes each.
    """
    opened = _open(sealed, private_key, _VALUES + context)
    if len(opened) % 4:
        raise BadSignature("the sealed values are no numbers of 4 bytes each")
    return np.frombuffer(opened, "<u4")


def mask_of(seed: bytes, values: int) -> NDArray[np.uint32]:
    """Return the mask of a seed, uint32 (values,)."""
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(4 * values))
    return np.frombuffer(stream, "<u4")


_VALUES = b"values "
"""Begins the context of masked values, which no seed has."""


def _seal(data: bytes, public_key: bytes, context: bytes) -> bytes:
    try:
        return _SUITE.encrypt(data, X25519PublicKey.from_public_bytes(public_key), info=context)
    except ValueError as error:
        raise BadSignature(f"nothing can be sealed for the key {public_key.hex()[:16]}") from error


def _open(sealed: bytes, private_key: bytes, context: bytes) -> bytes:
    try:
        return _SUITE.decrypt(sealed, X25519PrivateKey.from_private_bytes(private_key), info=context)
    except (InvalidTag, ValueError) as error:
        raise BadSignature("it is not sealed for this key and submission") from error
