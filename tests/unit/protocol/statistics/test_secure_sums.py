"""Masks add up, and open for their key and submission only."""

import hmac
import os
import struct

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from msgspec.structs import replace
from numpy.typing import NDArray

from protocol.errors import BadSignature
from protocol.statistics.secure_sums import (
    mask_of,
    open_seed,
    open_values,
    sealed_mask,
    sealed_values,
    submission_context,
)
from protocol.wire.arrays import to_tensor
from protocol.wire.messages import SealedMask, SumReply
from protocol.wire.signing import is_own_mask, is_own_sum, public_key, sign_sum

OPERATOR, OTHER, DEVICE, SEED = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32, bytes(range(32))
WHERE = {"fleet": "orchard", "task": bytes(32), "device": "shed-1", "sequence": 4, "values": 17}
CONTEXT = submission_context(**WHERE)  # type: ignore[arg-type]


def seal_key(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sealed(seed: bytes = SEED) -> SealedMask:
    return sealed_mask(seed, seal_key=seal_key(OPERATOR), min_devices=10, signing_key=DEVICE, context=CONTEXT)


@given(
    values=arrays(np.int32, (3, 4), elements=st.integers(-(2**31), 2**31 - 1)),
    triangle=arrays(np.int32, 5, elements=st.integers(-(2**31), 2**31 - 1)),
)
def test_sum_of_masked_values_less_the_sum_of_masks_is_the_sum(
    values: NDArray[np.int32], triangle: NDArray[np.int32]
) -> None:
    total = np.zeros(17, np.uint32)
    for _ in range(3):
        seed = os.urandom(32)
        sealed = sealed_values([values, triangle], seed, key=seal_key(OTHER), context=CONTEXT)
        total += open_values(sealed, private_key=OTHER, context=CONTEXT) - mask_of(seed, 17)
    expected = np.concatenate([values.ravel(), triangle]).astype(np.int64) * 3
    np.testing.assert_array_equal(total, (expected % 2**32).astype(np.uint32))


def _block(seed: bytes, number: int) -> bytes:
    """Return a block of ChaCha20 (RFC 8439, section 2.3) with a nonce of zeros."""
    start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", seed), number, 0, 0, 0]
    words = list(start)
    for turn in range(20):
        for column in range(4):
            a, b, c, d = (4 * row + (column + turn % 2 * row) % 4 for row in range(4))
            for into, by, mixed, shift in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                words[into] = (words[into] + words[by]) % 2**32
                words[mixed] ^= words[into]
                words[mixed] = (words[mixed] << shift | words[mixed] >> (32 - shift)) % 2**32
    return struct.pack("<16I", *((one + two) % 2**32 for one, two in zip(words, start, strict=True)))


def test_mask_is_the_key_stream_of_256_bits() -> None:
    """No bit of the seed is lost, as where keys are folded to the 32 bits of a generator."""
    assert mask_of(SEED, 40).tobytes() == (_block(SEED, 0) + _block(SEED, 1) + _block(SEED, 2))[:160]
    first = mask_of(SEED, 1000)
    for bit in (0, 100, 255):
        changed = bytearray(SEED)
        changed[bit // 8] ^= 1 << bit % 8
        assert (mask_of(bytes(changed), 1000) == first).mean() < 0.01, "every bit of the seed matters"
    assert abs(np.unpackbits(first.view(np.uint8)).mean() - 0.5) < 0.02


def test_seed_opens_with_the_private_key() -> None:
    mask = sealed()
    assert open_seed(mask, private_key=OPERATOR, context=CONTEXT) == SEED
    assert mask.key == public_key(DEVICE)
    assert is_own_mask(mask, context=CONTEXT)
    assert sealed().sealed[:32] != mask.sealed[:32], "each has an X25519 key of its own"


@pytest.mark.parametrize(
    "changes",
    [{"fleet": "other"}, {"task": bytes([1]) * 32}, {"device": "shed-2"}, {"sequence": 5}, {"values": 18}],
)
def test_mask_is_bound_to_its_submission(changes: dict[str, object]) -> None:
    elsewhere = submission_context(**{**WHERE, **changes})  # type: ignore[arg-type]
    assert not is_own_mask(sealed(), context=elsewhere)
    with pytest.raises(BadSignature):
        open_seed(sealed(), private_key=OPERATOR, context=elsewhere)


def test_sealed_values_open_with_the_aggregators_key_for_their_submission_only() -> None:
    """They are not the plain masked values, nor open as a seed does."""
    seed, values = SEED, [np.arange(17, dtype=np.int32)]
    data = sealed_values(values, seed, key=seal_key(OTHER), context=CONTEXT)
    opened = open_values(data, private_key=OTHER, context=CONTEXT)
    np.testing.assert_array_equal(opened - mask_of(seed, 17), np.arange(17, dtype=np.uint32))
    assert opened.tobytes() not in data
    elsewhere = submission_context(**{**WHERE, "device": "shed-2"})  # type: ignore[arg-type]
    for key, context in ((OPERATOR, CONTEXT), (OTHER, elsewhere), (OTHER, b"x" + CONTEXT)):
        with pytest.raises(BadSignature):
            open_values(data, private_key=key, context=context)
    same = sealed_mask(seed, seal_key=seal_key(OTHER), min_devices=2, signing_key=DEVICE, context=CONTEXT)
    with pytest.raises(BadSignature):
        open_values(same.sealed, private_key=OTHER, context=CONTEXT)
    with pytest.raises(BadSignature, match="nothing can be sealed"):
        sealed_values(values, seed, key=bytes(32), context=CONTEXT)


def test_sealing_is_hpke_of_rfc_9180() -> None:
    """Opened with the key schedule as section 5.1 writes it, for suite 0x0020, 0x0001, 0x0003."""

    def extract(salt: bytes, label: bytes, data: bytes, suite: bytes) -> bytes:
        return hmac.digest(salt or bytes(32), b"HPKE-v1" + suite + label + data, "sha256")

    def expand(secret: bytes, label: bytes, info: bytes, length: int, suite: bytes) -> bytes:
        whole = struct.pack(">H", length) + b"HPKE-v1" + suite + label + info
        return HKDFExpand(hashes.SHA256(), length, whole).derive(secret)

    sealed_seed, own = sealed().sealed, X25519PrivateKey.from_private_bytes(OPERATOR)
    encapsulated, kem = sealed_seed[:32], b"KEM" + struct.pack(">H", 0x20)
    shared = own.exchange(X25519PublicKey.from_public_bytes(encapsulated))
    secret = expand(
        extract(b"", b"eae_prk", shared, kem), b"shared_secret", encapsulated + seal_key(OPERATOR), 32, kem
    )
    suite = b"HPKE" + struct.pack(">HHH", 0x20, 1, 3)
    schedule = b"\0" + extract(b"", b"psk_id_hash", b"", suite) + extract(b"", b"info_hash", CONTEXT, suite)
    scheduled = extract(secret, b"secret", b"", suite)
    key, nonce = (
        expand(scheduled, name, schedule, size, suite) for name, size in ((b"key", 32), (b"base_nonce", 12))
    )
    assert ChaCha20Poly1305(key).decrypt(nonce, sealed_seed[32:], b"") == SEED


def test_another_key_or_changed_bytes_open_nothing() -> None:
    with pytest.raises(BadSignature):
        open_seed(sealed(), private_key=OTHER, context=CONTEXT)
    for position in (0, 40, 79):
        spoilt = bytearray(sealed().sealed)
        spoilt[position] ^= 1
        changed = replace(sealed(), sealed=bytes(spoilt))
        assert not is_own_mask(changed, context=CONTEXT)
        with pytest.raises(BadSignature):
            open_seed(changed, private_key=OPERATOR, context=CONTEXT)
    assert not is_own_mask(replace(sealed(), min_devices=2), context=CONTEXT)
    with pytest.raises(BadSignature):
        open_seed(replace(sealed(), sealed=bytes(80)), private_key=OPERATOR, context=CONTEXT)


def test_sum_is_signed_with_its_request() -> None:
    reply = sign_sum(
        SumReply(request=bytes(32), masks=to_tensor(np.arange(4, dtype=np.uint32))), key=OPERATOR, fleet="f"
    )
    public = public_key(OPERATOR)
    assert is_own_sum(reply, public=public, fleet="f")
    other = to_tensor(np.arange(1, 5, dtype=np.uint32))
    for changed in (replace(reply, request=bytes([1]) * 32), replace(reply, masks=other)):
        assert not is_own_sum(changed, public=public, fleet="f")
    refused = sign_sum(SumReply(request=bytes(32), problem="too few"), key=OPERATOR, fleet="f")
    assert is_own_sum(refused, public=public, fleet="f")
    assert not is_own_sum(replace(refused, problem="none"), public=public, fleet="f")
    assert not is_own_sum(replace(refused, masks=other), public=public, fleet="f")
    assert not is_own_sum(reply, public=public, fleet="g")
    assert not is_own_sum(reply, public=public_key(OTHER), fleet="f")
