"""Manifest trust: one aggregator, and no release older than the last one."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.core.manifest_trust import (
    Identity,
    ManifestTrust,
    TimeEstimate,
    UntrustedManifest,
    expired,
    verify,
    with_operator_key,
)
from protocol.errors import BadSignature
from protocol.wire.messages import KeyCertificate, Signed
from protocol.wire.signing import open_manifest, public_key, sign_key_certificate
from protocol.wire.topics import FleetChannel
from tests.support.messages.manifests import signed_manifest

KEY, OTHER = b"k" * 32, b"o" * 32
CHANNELS: tuple[FleetChannel, ...] = ("task", "round", "head")


def signed(release: int, body: bytes = b"", *, key: bytes = KEY) -> Signed:
    """Return a manifest whose signature was verified before."""
    return Signed(
        key=key,
        release=release,
        issued_s=100 * release,
        expires_s=100 * release + 1000,
        signature=bytes(64),
        body=body,
    )


def stored(known: ManifestTrust) -> ManifestTrust:
    """Return the trust after a restart."""
    return msgspec.json.decode(msgspec.json.encode(known), type=ManifestTrust)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(CHANNELS),
            st.integers(1, 6),
            st.sampled_from([b"one", b"two"]),
            st.sampled_from([KEY, OTHER]),
        ),
        max_size=30,
    )
)
def test_any_order_leads_to_the_greatest_release(
    messages: list[tuple[FleetChannel, int, bytes, bytes]],
) -> None:
    """On each channel an older release is refused, and so is another aggregator."""
    known = ManifestTrust(KEY)
    accepted: dict[str, tuple[int, bytes]] = {}
    for channel, release, body, key in messages:
        before = accepted.get(channel, (0, b""))
        with contextlib.suppress(UntrustedManifest):
            known = verify(known, channel, signed(release, body, key=key))
            assert key == KEY
            assert release > before[0] or (release, body) == before
            accepted[channel] = release, body
        known = stored(known)  # a restart at any moment changes nothing
    for channel in CHANNELS:
        releases = [release for where, release, _, key in messages if where == channel and key == KEY]
        assert known.seen.get(channel, (0, b""))[0] == max(releases, default=0)
    assert known.key == KEY


def test_an_operator_key_replaces_the_stored_one() -> None:
    """Another key resets the releases seen."""
    known = verify(ManifestTrust(), "head", signed(9))
    assert with_operator_key(known, Identity()) == known
    assert with_operator_key(known, Identity(KEY)).seen == known.seen
    other = with_operator_key(known, Identity(OTHER))
    assert other == ManifestTrust(OTHER, configured=(OTHER, 0.0))
    assert verify(other, "head", signed(1, key=OTHER)).key == OTHER
    with pytest.raises(UntrustedManifest):
        verify(other, "head", signed(1))


def test_a_manifest_expires_unless_a_newer_one_arrives() -> None:
    """Each channel for itself; a repetition of the last one changes nothing."""
    known = verify(verify(ManifestTrust(KEY), "task", signed(5)), "head", signed(7))
    assert stored(known) == known
    assert known.issued_s == 700
    assert expired(known, now_s=1500) == frozenset()
    assert expired(known, now_s=1501) == {"task"}
    assert expired(known, now_s=1701) == {"task", "head"}
    assert verify(known, "task", signed(5)) == known
    assert expired(verify(known, "task", signed(8)), now_s=1701) == {"head"}


@pytest.mark.parametrize(("clock_s", "now_s"), [(0.0, 1060.0), (1030.0, 1060.0), (5000.0, 5000.0)])
def test_a_clock_that_is_behind_is_corrected_by_the_last_date(clock_s: float, now_s: float) -> None:
    """A device without a battery-backed clock starts in 1970; the time since the date passes all the same."""
    estimate = TimeEstimate(floor_s=1000.0, since_s=40.0)
    assert estimate.now_s(clock_s=clock_s, monotonic_s=100.0) == now_s


SECRETS = {
    name: bytes([number]) * 32 for number, name in enumerate(("first", "second", "third", "root", "thief"))
}
PUBLIC = {name: public_key(secret) for name, secret in SECRETS.items()}


def certificate(number: int, name: str, *, signer: str, root: str = "") -> KeyCertificate:
    root_key = PUBLIC[root] if root else b""
    return sign_key_certificate(
        PUBLIC[name], number=number, root=root_key, fleet="barn", signer=SECRETS[signer]
    )


def follows(trust: ManifestTrust, name: str, *certificates: KeyCertificate) -> ManifestTrust | None:
    """Return the trust after a manifest of a key with certificates; None if it is refused."""
    release = trust.seen.get("task", (0, b""))[0] + 1
    payload = signed_manifest(
        b"", key=SECRETS[name], fleet="barn", channel="task", release=release, certificates=certificates
    )
    with contextlib.suppress(UntrustedManifest):
        return stored(verify(trust, "task", open_manifest(payload, fleet="barn", channel="task")))
    return None


TO_SECOND = certificate(1, "second", signer="first")
TO_THIRD = certificate(2, "third", signer="second")
BY_ROOT = certificate(1, "second", signer="root", root="root")
TO_ROOT = certificate(1, "second", signer="first", root="root")


def test_a_device_follows_the_keys_that_the_trusted_one_has_signed() -> None:
    """Also after it has missed one, in any order; then the old keys are refused, with any certificate."""
    trust = ManifestTrust(PUBLIC["first"], seen={"task": (5, b"")})
    assert follows(trust, "third") is None
    assert follows(trust, "third", TO_THIRD) is None
    after = follows(trust, "third", TO_THIRD, TO_SECOND)
    assert after is not None
    assert (after.key, after.number, after.seen["task"][0]) == (PUBLIC["third"], 2, 6)
    assert follows(after, "third", TO_SECOND, TO_THIRD) is not None
    stolen = certificate(3, "thief", signer="second")
    for name, chain in (("first", ()), ("second", (TO_SECOND,)), ("thief", (TO_SECOND, TO_THIRD, stolen))):
        assert follows(after, name, *chain) is None


def test_with_a_root_key_a_stolen_signing_key_signs_no_other() -> None:
    """From the certificate on in which the first key names the root; the root replaces the stolen key."""
    trust = follows(ManifestTrust(PUBLIC["first"]), "second", TO_ROOT, BY_ROOT)
    assert trust is not None
    assert (trust.key, trust.root) == (PUBLIC["second"], PUBLIC["root"])
    assert follows(trust, "thief", TO_ROOT, certificate(9, "thief", signer="second")) is None
    after = follows(trust, "third", TO_ROOT, BY_ROOT, certificate(2, "third", signer="root", root="root"))
    assert after is not None
    assert follows(after, "second", TO_ROOT, BY_ROOT) is None
    assert follows(after, "second", certificate(1, "second", signer="root", root="root")) is None


@pytest.mark.parametrize("start", ["first use", "enrolled"])
def test_a_new_device_knows_the_root_from_the_start(start: str) -> None:
    """Its enrollment or the first manifest has it."""
    trust: ManifestTrust | None = ManifestTrust()
    if start == "enrolled":
        trust = with_operator_key(
            ManifestTrust(), Identity(PUBLIC["second"], 1, PUBLIC["root"], enrolled_s=9.0)
        )
    assert trust is not None
    trust = follows(trust, "second", TO_ROOT, BY_ROOT)
    assert trust is not None
    assert (trust.key, trust.number, trust.root) == (PUBLIC["second"], 1, PUBLIC["root"])
    assert follows(trust, "thief", certificate(9, "thief", signer="second")) is None


def test_the_operators_key_does_not_undo_a_replacement() -> None:
    """A restart with the same option or enrollment; a new enrollment does."""
    trust = with_operator_key(ManifestTrust(), Identity(PUBLIC["first"], enrolled_s=9.0))
    after = follows(trust, "second", TO_SECOND)
    assert after is not None
    assert with_operator_key(after, Identity(PUBLIC["first"], enrolled_s=9.0)) == after
    assert with_operator_key(after, Identity(PUBLIC["first"], enrolled_s=10.0)).key == PUBLIC["first"]


def test_a_forged_or_foreign_certificate_is_refused() -> None:
    """Its signature is verified with the manifest's; it is valid for one fleet."""
    foreign = sign_key_certificate(
        PUBLIC["second"], number=1, root=b"", fleet="shed", signer=SECRETS["first"]
    )
    for bad in (foreign, msgspec.structs.replace(TO_SECOND, number=3)):
        with pytest.raises(BadSignature, match="certificate"):
            follows(ManifestTrust(PUBLIC["first"]), "second", bad)
