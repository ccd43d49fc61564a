"""Authentication on a real store: by name and by key."""

import contextlib

import msgspec
import pytest

from aggregator.intake.frame_authentication import FrameAuthenticator
from aggregator.intake.validation import Refused
from aggregator.storage import keys
from aggregator.storage.keys import Key, refusal_reason
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from protocol.errors import StateError
from protocol.wire.codec import digest_of
from protocol.wire.messages import Frame
from protocol.wire.signing import public_key, sign_frame

ONE, TWO = b"1" * 32, b"2" * 32
FRAME = Frame(v=1, digest=digest_of(b"payload"), size_bytes=7, offset=0, data=b"payload")


def signed(device: str = "a", *, key: bytes = ONE, fleet: str = "barn") -> Frame:
    return sign_frame(FRAME, key=key, fleet=fleet, device=device)


@pytest.fixture
def authenticator(store: Store) -> FrameAuthenticator:
    return FrameAuthenticator(store, fleet="barn")


def reason(authenticator: FrameAuthenticator, frame: Frame, device: str = "a") -> str:
    with pytest.raises(Refused) as caught:
        authenticator.check(device, frame)
    return caught.value.reason


def test_open_fleet_pins_the_first_key(store: Store, authenticator: FrameAuthenticator) -> None:
    """Of each device, also after a restart; the refusal of another key names the remedy."""
    authenticator.check("a", signed())
    authenticator.check("a", signed())
    authenticator.check("b", signed("b", key=TWO))
    for each in (authenticator, FrameAuthenticator(open_store(store.folder), fleet="barn")):
        with pytest.raises(Refused, match="`aggregator reset-key a`") as caught:
            each.check("a", signed(key=TWO))
        assert caught.value.reason == "signature"
        each.check("a", signed())
    assert {name: key.public for name, key in store.keys.all().items()} == {
        "a": public_key(ONE), "b": public_key(TWO)
    }  # fmt: skip


INVALID = {
    "unsigned": FRAME,
    "no signature": msgspec.structs.replace(signed(), signature=b""),
    "no key": msgspec.structs.replace(signed(), key=b"short"),
    "other key": msgspec.structs.replace(signed(), key=public_key(TWO)),
    "other payload": msgspec.structs.replace(signed(), digest=digest_of(b"another")),
    "other size": msgspec.structs.replace(signed(), size_bytes=8),
    "other device": signed("b"),
    "other fleet": signed(fleet="shed"),
}


@pytest.mark.parametrize("frame", INVALID.values(), ids=INVALID.keys())
def test_invalid_signature_is_refused_and_pins_nothing(
    store: Store, authenticator: FrameAuthenticator, frame: Frame
) -> None:
    """Of a device whose key is unknown, and of one whose key is known."""
    assert reason(authenticator, frame) == "signature"
    assert store.keys.all() == {}
    authenticator.check("a", signed())
    assert reason(authenticator, frame) == "signature"


def test_closed_fleet_accepts_only_enrolled_keys(store: Store, authenticator: FrameAuthenticator) -> None:
    """A pinned key is refused from then on."""
    authenticator.check("a", signed())
    store.keys.close_fleet()
    for device in ("a", "b"):
        assert reason(authenticator, signed(device), device) == "unknown_device"
        with pytest.raises(Refused, match="aggregator enroll"):
            authenticator.check_name(device)
    store.keys.enroll("a", public_key(TWO), serial="7f", now_s=1.0)
    authenticator.check_name("a")
    authenticator.check("a", signed(key=TWO))
    with pytest.raises(Refused, match="with the folder of its last enrollment"):
        authenticator.check("a", signed())
    assert store.keys.get("a") == Key(public_key(TWO), enrolled=True, since_s=1.0, serial="7f")


def test_revocation_applies_to_the_next_batch(store: Store, authenticator: FrameAuthenticator) -> None:
    """One that is undone does not."""
    with store.transaction():
        authenticator.check("a", signed())
        authenticator.check("a", signed())
    with contextlib.suppress(StateError), store.transaction():
        store.keys.revoke("a", now_s=4.0)
        raise StateError
    with store.transaction():
        authenticator.check("a", signed())
    store.keys.revoke("a", now_s=5.0)
    with store.transaction():
        assert reason(authenticator, signed()) == "revoked"
    store.keys.enroll("a", public_key(TWO), now_s=6.0)
    with store.transaction():
        authenticator.check("a", signed(key=TWO))
    store.keys.revoke("a", now_s=7.0)
    assert reason(authenticator, signed(key=TWO)) == "revoked"


def test_reset_pinned_key_accepts_the_next_one(store: Store, authenticator: FrameAuthenticator) -> None:
    authenticator.check("a", signed())
    assert store.keys.reset("a")
    authenticator.check("a", signed(key=TWO))
    store.keys.enroll("a", public_key(ONE), now_s=0.0)
    assert not store.keys.reset("a")
    store.keys.pin("b", public_key(ONE), now_s=0.0)
    store.keys.revoke("b", now_s=1.0)
    assert not store.keys.reset("b")
    assert not store.keys.reset("unknown")


def test_pinned_devices_are_bounded(
    store: Store, authenticator: FrameAuthenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients can make up any number of names; enrolled devices are not counted."""
    monkeypatch.setattr(keys, "MAX_PINNED_DEVICES", 3)
    store.keys.enroll("z", public_key(TWO), now_s=0.0)
    for device in ("a", "b", "c"):
        authenticator.check(device, signed(device))
    assert reason(authenticator, signed("d"), "d") == "unknown_device"
    assert store.keys.get("d") is None
    authenticator.check("a", signed())
    authenticator.check("z", signed("z", key=TWO))
    assert keys.counts(store.keys.all().values()) == {"enrolled": 1, "first_use": 3, "revoked": 0}


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize(
    "known", [None, Key(ONE, enrolled=False, since_s=0.0), Key(ONE, enrolled=True, since_s=0.0)]
)
def test_name_is_accepted_if_and_only_if_its_key_is(known: Key | None, *, is_closed: bool) -> None:
    """An unsigned message is decided like one with the known key."""
    assert refusal_reason(known, is_closed=is_closed) == refusal_reason(
        known, is_closed=is_closed, public=ONE
    )
