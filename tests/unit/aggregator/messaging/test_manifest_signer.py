"""What is said to the fleet: signed, and numbered so that devices believe it after whatever was said before."""

import stat
import threading
import time
from pathlib import Path

import pytest

from aggregator.messaging.manifest_signer import ManifestSigner, identity_of, next_release
from aggregator.security.identity import locked_identity
from aggregator.storage.facts import SigningKey
from aggregator.storage.store import Store
from edge_client.agent.manifest_trust import ManifestTrust, verify
from protocol.storage.keyfile import read_or_make_key
from protocol.wire.messages import Signed
from protocol.wire.signing import open_manifest, public_key, sign_manifest
from protocol.wire.topics import FleetChannel

KEY = b"k" * 32


def said(by: ManifestSigner, body: bytes, *, channel: FleetChannel = "head") -> Signed:
    """What devices hear."""
    payload = by.sign(channel, body)
    by.keep()
    return open_manifest(payload, fleet="barn", channel=channel)


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, *, at_s: float) -> ManifestSigner:
    """A start of the aggregator at that time."""
    monkeypatch.setattr(time, "time", lambda: at_s)
    return ManifestSigner(Store(folder), key=KEY, fleet="barn")


def test_what_is_new_has_a_greater_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is repeated has the same one, byte by byte; each topic counts for itself."""
    by = start(tmp_path, monkeypatch, at_s=1000.0)
    first, second = said(by, b"one"), said(by, b"two")
    assert (first.release, second.release) == (1000, 1001)
    assert (first.key, second.body) == (public_key(KEY), b"two")
    assert by.sign("head", b"two") == by.sign("head", b"two")
    assert said(by, b"two") == second
    assert said(by, b"one").release == 1002
    assert said(by, b"one", channel="task").release == 1000


@pytest.mark.parametrize("at_s", [500.0, 1000.0, 5000.0])
def test_every_start_says_it_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_s: float) -> None:
    """Also where nothing has changed, and where the clock was set back."""
    before = said(start(tmp_path, monkeypatch, at_s=1000.0), b"one")
    after = said(start(tmp_path, monkeypatch, at_s=at_s), b"one")
    assert after.release == max(1001, int(at_s)) == next_release(before.release, now_s=at_s)


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "restored from a backup"])
def test_a_state_of_earlier_is_believed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lost: bool
) -> None:
    """With the same key: its numbers follow the clock, past all that was said since the backup was made."""
    if not lost:
        said(start(tmp_path / "backup", monkeypatch, at_s=1000.0), b"one")
    device, by = ManifestTrust(), start(tmp_path / "state", monkeypatch, at_s=1000.0)
    for number in range(50):
        device = verify(device, "head", said(by, b"%d" % number))
    restored = start(tmp_path / "backup", monkeypatch, at_s=2000.0)
    assert verify(device, "head", said(restored, b"0")).seen["head"][0] == 2000


def test_the_key_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    """The next start has the same one; `status` reads the public half of it."""
    key = identity_of(tmp_path)
    assert identity_of(tmp_path) == key
    assert stat.S_IMODE((tmp_path / "identity" / "signing.key").stat().st_mode) == 0o600
    store = Store(tmp_path)
    ManifestSigner(store, key=key, fleet="barn")
    assert store.facts.get(SigningKey) == SigningKey(public_key(key).hex())


def test_a_clock_that_was_ahead_shuts_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of before that finds on the broker what it said then: what it says from now on is believed."""
    before = start(tmp_path / "state", monkeypatch, at_s=1e10)
    payload = before.sign("head", b"one")
    device = verify(ManifestTrust(), "head", open_manifest(payload, fleet="barn", channel="head"))
    restored = start(tmp_path / "backup", monkeypatch, at_s=2000.0)
    said(restored, b"one")
    assert restored.has_signed("head", payload)
    again = said(restored, b"one")
    assert verify(device, "head", again).seen["head"][0] == int(1e10) + 1
    assert restored.has_signed("head", restored.sign("head", b"one"))
    assert said(restored, b"one") == again
    assert not restored.has_signed(
        "head", sign_manifest(b"x", key=b"o" * 32, fleet="barn", channel="head", release=2**40)
    )
    assert said(restored, b"two").release == int(1e10) + 2


def test_two_that_make_the_key_at_once_make_one(tmp_path: Path) -> None:
    """A first start waits for the first enrollment, which gives the device the key that is kept."""
    made: list[bytes] = []
    with locked_identity(tmp_path):
        start = threading.Thread(target=lambda: made.append(identity_of(tmp_path)))
        start.start()
        start.join(0.3)
        own = read_or_make_key(tmp_path / "identity" / "signing.key")
    start.join()
    assert made == [own]


def test_another_key_than_before_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the first start there is none before; at later ones, who has lost the key is told whom devices believe."""
    ManifestSigner(Store(tmp_path), key=KEY, fleet="barn")
    ManifestSigner(Store(tmp_path), key=KEY, fleet="barn")
    assert not caplog.messages
    ManifestSigner(Store(tmp_path), key=b"l" * 32, fleet="barn")
    (line,) = caplog.messages
    assert "is not the key that devices trust: restore it from a backup" in line
    assert f"trusted={public_key(KEY).hex()}" in line
