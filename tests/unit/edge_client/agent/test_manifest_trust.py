"""Manifest trust: one aggregator, and no release older than the last one."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.agent import manifest_trust
from edge_client.agent.manifest_trust import ManifestTrust, UntrustedManifest, verify
from protocol.wire.messages import Signed
from protocol.wire.topics import FleetChannel

KEY, OTHER = b"k" * 32, b"o" * 32
CHANNELS: tuple[FleetChannel, ...] = ("task", "round", "head")


def said(release: int, body: bytes = b"", *, key: bytes = KEY) -> Signed:
    """Return a manifest whose signature was verified before."""
    return Signed(key=key, release=release, signature=bytes(64), body=body)


def stored(known: ManifestTrust) -> ManifestTrust:
    """Return the trust after a restart."""
    return msgspec.json.decode(msgspec.json.encode(known), type=ManifestTrust)


_heard = st.lists(
    st.tuples(
        st.sampled_from(CHANNELS),
        st.integers(1, 6),
        st.sampled_from([b"one", b"two"]),
        st.sampled_from([KEY, OTHER]),
    ),
    max_size=30,
)


@given(_heard)
def test_any_order_leads_to_the_greatest_release(
    messages: list[tuple[FleetChannel, int, bytes, bytes]],
) -> None:
    """On each channel an older release is refused, and so is another aggregator."""
    known = ManifestTrust(KEY)
    believed: dict[str, tuple[int, bytes]] = {}
    for channel, release, body, key in messages:
        before = believed.get(channel, (0, b""))
        with contextlib.suppress(UntrustedManifest):
            known = verify(known, channel, said(release, body, key=key))
            assert key == KEY
            assert release > before[0] or (release, body) == before
            believed[channel] = release, body
        known = stored(known)  # a restart at any moment changes nothing
    for channel in CHANNELS:
        told = [release for where, release, _, key in messages if where == channel and key == KEY]
        assert known.seen.get(channel, (0, b""))[0] == max(told, default=0)
    assert known.key == KEY


def test_the_first_key_is_trusted_and_no_other() -> None:
    """On every channel, unless the operator gave one."""
    known = verify(ManifestTrust(), "task", said(5))
    assert known.key == KEY
    for channel in CHANNELS:
        with pytest.raises(UntrustedManifest, match="signed by another aggregator") as caught:
            verify(known, channel, said(9, key=OTHER))
        assert caught.value.reason == "signature"
    assert "--aggregator-key" in str(caught.value)


def test_a_release_has_one_content() -> None:
    """A repetition is accepted, other content and older releases are not."""
    known = verify(ManifestTrust(), "head", said(5, b"this"))
    assert verify(known, "head", said(5, b"this")) == known
    for release, body in ((5, b"that"), (4, b"this")):
        with pytest.raises(UntrustedManifest) as caught:
            verify(known, "head", said(release, body))
        assert caught.value.reason == "replayed"


def test_channels_have_separate_releases() -> None:
    """A release on one does not refuse one on another."""
    known = verify(ManifestTrust(), "task", said(9))
    assert verify(known, "head", said(1)).seen.keys() == {"task", "head"}


def test_an_operator_key_replaces_the_stored_one() -> None:
    """Another key resets the releases seen."""
    known = verify(ManifestTrust(), "head", said(9))
    assert manifest_trust.with_operator_key(known, OTHER) == ManifestTrust(OTHER)
    assert (
        manifest_trust.with_operator_key(known, KEY) == manifest_trust.with_operator_key(known, None) == known
    )
    assert verify(manifest_trust.with_operator_key(known, OTHER), "head", said(1, key=OTHER)).key == OTHER
    with pytest.raises(UntrustedManifest):
        verify(manifest_trust.with_operator_key(ManifestTrust(), OTHER), "head", said(1))


def test_trust_survives_storage() -> None:
    """Also without a key."""
    assert stored(ManifestTrust()) == ManifestTrust()
    known = ManifestTrust(KEY, {"head": (7, b"d" * 32)})
    assert stored(known) == known
