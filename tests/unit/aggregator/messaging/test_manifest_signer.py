"""Signed manifests, numbered so that devices accept them after all earlier ones."""

import threading
import time
from pathlib import Path

import pytest

from aggregator.messaging.manifest_signer import REFRESH_S, VALIDITY_S, ManifestSigner, identity_of
from aggregator.security.identity import locked_identity
from aggregator.storage.open_store import open_store
from edge_client.agent.manifest_trust import ManifestTrust, verify
from protocol.storage.keyfile import read_or_make_key
from protocol.wire.messages import Signed
from protocol.wire.signing import open_manifest, public_key
from protocol.wire.topics import FleetChannel
from tests.support.messages.manifests import signed_manifest

KEY = b"k" * 32


def manifest(signer: ManifestSigner, body: bytes, *, channel: FleetChannel = "head") -> Signed:
    payload = signer.sign(channel, body)
    signer.keep()
    return open_manifest(payload, fleet="barn", channel=channel)


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, *, at_s: float) -> ManifestSigner:
    monkeypatch.setattr(time, "time", lambda: at_s)
    return ManifestSigner(open_store(folder), key=KEY, fleet="barn")


def test_new_manifest_has_a_greater_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged one is repeated byte by byte; each channel has its own numbers."""
    signer = start(tmp_path, monkeypatch, at_s=1000.0)
    first, second = manifest(signer, b"one"), manifest(signer, b"two")
    assert (first.release, second.release) == (1000, 1001)
    assert (first.key, second.body) == (public_key(KEY), b"two")
    assert signer.sign("head", b"two") == signer.sign("head", b"two")
    assert manifest(signer, b"two") == second
    assert manifest(signer, b"one").release == 1002
    assert manifest(signer, b"one", channel="task").release == 1000


@pytest.mark.parametrize("at_s", [500.0, 1000.0, 5000.0])
def test_every_start_signs_with_a_greater_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_s: float
) -> None:
    """This holds if nothing has changed, and if the clock was set back."""
    manifest(start(tmp_path, monkeypatch, at_s=1000.0), b"one")
    after = manifest(start(tmp_path, monkeypatch, at_s=at_s), b"one")
    assert after.release == max(1001, int(at_s))


def test_a_manifest_is_signed_again_long_before_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every day, for a month each time; at once if the clock was ahead when it was signed."""
    signer = start(tmp_path, monkeypatch, at_s=10_000.0)
    first = manifest(signer, b"one")
    assert (first.issued_s, first.expires_s) == (10_000, 10_000 + VALIDITY_S)
    monkeypatch.setattr(time, "time", lambda: 10_000 + REFRESH_S - 1)
    assert signer.due() == []
    assert manifest(signer, b"one") == first
    monkeypatch.setattr(time, "time", lambda: 10_000 + REFRESH_S)
    assert signer.due() == ["head"]
    assert manifest(signer, b"one").issued_s == 10_000 + REFRESH_S
    assert signer.due() == []
    monkeypatch.setattr(time, "time", lambda: 500)
    assert signer.due() == ["head"]
    again = manifest(signer, b"one")
    assert again.issued_s == 500
    assert again.release > 10_000 + REFRESH_S


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "restored from a backup"])
def test_manifests_of_a_restored_state_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lost: bool
) -> None:
    """With the same key: its numbers follow the clock, beyond those since the backup."""
    if not lost:
        manifest(start(tmp_path / "backup", monkeypatch, at_s=1000.0), b"one")
    device, signer = ManifestTrust(), start(tmp_path / "state", monkeypatch, at_s=1000.0)
    for number in range(50):
        device = verify(device, "head", manifest(signer, b"%d" % number))
    restored = start(tmp_path / "backup", monkeypatch, at_s=2000.0)
    assert verify(device, "head", manifest(restored, b"0")).seen["head"][0] == 2000


def test_manifests_after_a_clock_that_was_ahead_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restored state that finds its own newer manifest on the broker continues after its number."""
    before = start(tmp_path / "state", monkeypatch, at_s=1e10)
    payload = before.sign("head", b"one")
    device = verify(ManifestTrust(), "head", open_manifest(payload, fleet="barn", channel="head"))
    restored = start(tmp_path / "backup", monkeypatch, at_s=2000.0)
    manifest(restored, b"one")
    assert restored.has_signed("head", payload)
    again = manifest(restored, b"one")
    assert verify(device, "head", again).seen["head"][0] == int(1e10) + 1
    assert restored.has_signed("head", restored.sign("head", b"one"))
    assert manifest(restored, b"one") == again
    assert not restored.has_signed(
        "head", signed_manifest(b"x", key=b"o" * 32, fleet="barn", channel="head", release=2**40)
    )
    assert manifest(restored, b"two").release == int(1e10) + 2


def test_concurrent_starts_create_one_key(tmp_path: Path) -> None:
    """A first start waits for the first enrollment, which gives the device the same key."""
    made: list[bytes] = []
    with locked_identity(tmp_path):
        start = threading.Thread(target=lambda: made.append(identity_of(tmp_path)))
        start.start()
        start.join(0.3)
        own = read_or_make_key(tmp_path / "identity" / "signing.key")
    start.join()
    assert made == [own]


def test_changed_key_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The line names the key that devices trust; the first start logs none."""
    ManifestSigner(open_store(tmp_path), key=KEY, fleet="barn")
    ManifestSigner(open_store(tmp_path), key=KEY, fleet="barn")
    assert not caplog.messages
    ManifestSigner(open_store(tmp_path), key=b"l" * 32, fleet="barn")
    (line,) = caplog.messages
    assert "is not the key that devices trust: restore it from a backup" in line
    assert f"trusted={public_key(KEY).hex()}" in line
