"""Ed25519 signatures of manifests and transfers."""

from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import BadSignature
from protocol.wire.codec import encode
from protocol.wire.messages import MAX_KEY_CERTIFICATES, MAX_MANIFEST_BYTES, MAX_SIGNED_BYTES, Frame
from protocol.wire.signing import is_own_transfer, open_manifest, public_key, sign_frame, sign_key_certificate
from tests.support.messages.manifests import signed_manifest

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
BODY = b"a manifest"
SIGNED = signed_manifest(
    BODY, key=KEY, fleet="barn", channel="head", release=7, issued_s=1000, expires_s=2000
)
DIGEST = b"d" * 32
FRAME = Frame(v=1, digest=DIGEST, size_bytes=9, offset=0, data=b"")
SIGNATURE = sign_frame(FRAME, key=KEY, fleet="barn", device="cam").signature


def is_own(public: bytes, signature: bytes, **changed: Any) -> bool:
    transfer = {"fleet": "barn", "device": "cam", "digest": DIGEST, "size_bytes": 9, **changed}
    return is_own_transfer(public, signature, **transfer)


def test_signed_bytes_are_as_documented() -> None:
    signed = open_manifest(SIGNED, fleet="barn", channel="head")
    key = Ed25519PublicKey.from_public_bytes(signed.key)
    key.verify(signed.signature, b"protofleet 1 manifest barn head 7 1000 2000\n" + BODY)
    key.verify(SIGNATURE, b"protofleet 1 transfer barn cam 9\n" + DIGEST)


@given(body=st.binary(max_size=500), release=st.integers(1, 2**63 - 1))
def test_signed_manifest_is_opened(body: bytes, release: int) -> None:
    payload = signed_manifest(body, key=KEY, fleet="barn", channel="task", release=release)
    signed = open_manifest(payload, fleet="barn", channel="task")
    assert (signed.body, signed.release, signed.key) == (body, release, public_key(KEY))


def test_largest_manifest_fits() -> None:
    body, fleet, last = bytes(MAX_MANIFEST_BYTES), "f" * 64, 2**63 - 1
    each = sign_key_certificate(public_key(KEY), number=last, root=bytes(32), fleet=fleet, signer=OTHER)
    payload = signed_manifest(
        body,
        key=KEY,
        fleet=fleet,
        channel="round",
        release=last,
        expires_s=last,
        certificates=(each,) * MAX_KEY_CERTIFICATES,
    )
    assert MAX_SIGNED_BYTES - 1024 <= len(payload) <= MAX_SIGNED_BYTES
    assert open_manifest(payload, fleet="f" * 64, channel="round").body == body


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", public_key(OTHER)),
        ("key", bytes(32)),
        ("release", 8),
        ("issued_s", 1001),
        ("expires_s", 2001),
        ("signature", bytes(64)),
        ("body", b"b manifest"),
        ("body", b""),
    ],
)
def test_changed_signed_message_is_refused(field: str, value: bytes | int) -> None:
    signed = open_manifest(SIGNED, fleet="barn", channel="head")
    changed = msgspec.structs.replace(signed, **{field: value})
    with pytest.raises(BadSignature, match="head is not signed"):
        open_manifest(encode(changed), fleet="barn", channel="head")


def test_signature_is_bound_to_fleet_and_topic() -> None:
    for fleet, channel in (("field", "head"), ("barn", "task")):
        with pytest.raises(BadSignature):
            open_manifest(SIGNED, fleet=fleet, channel=channel)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed", [{"fleet": "field"}, {"device": "cat"}, {"digest": b"e" * 32}, {"size_bytes": 8}]
)
def test_transfer_signature_is_bound_to_device_and_payload(changed: dict[str, object]) -> None:
    assert is_own(public_key(KEY), SIGNATURE)
    assert not is_own(public_key(KEY), SIGNATURE, **changed)
    assert not is_own(public_key(OTHER), SIGNATURE)


@given(public=st.binary(max_size=40), signature=st.binary(max_size=80))
def test_verification_never_raises(public: bytes, signature: bytes) -> None:
    assert not is_own(public, signature)
