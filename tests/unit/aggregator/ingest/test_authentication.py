"""Who is let in, on a real store: by name, by key, and by what another process has done to the keys meanwhile."""

from pathlib import Path

import msgspec
import pytest

from aggregator.ingest.authentication import FrameAuthenticator
from aggregator.ingest.validation import Refused
from aggregator.storage import device_keys
from aggregator.storage.device_keys import Key, refusal_reason
from aggregator.storage.store import Store
from protocol.wire.codec import digest_of
from protocol.wire.messages import Frame
from protocol.wire.signing import public_key, sign_frame

ONE, TWO = b"1" * 32, b"2" * 32
FRAME = Frame(v=1, digest=digest_of(b"payload"), size_bytes=7, offset=0, data=b"payload")


def signed(device: str = "a", *, key: bytes = ONE, fleet: str = "barn") -> Frame:
    """A device's frame."""
    return sign_frame(FRAME, key=key, fleet=fleet, device=device)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store of an open fleet."""
    return Store(tmp_path)


def reason(gate: FrameAuthenticator, frame: Frame, device: str = "a") -> str:
    """Why a frame is refused."""
    with pytest.raises(Refused) as caught:
        gate.check(device, frame)
    return caught.value.reason


def test_in_an_open_fleet_the_first_key_counts(store: Store) -> None:
    """Under each name, and after a restart; with another key nobody speaks for it."""
    gate = FrameAuthenticator(store, fleet="barn")
    gate.check("a", signed())
    gate.check("a", signed())
    gate.check("b", signed("b", key=TWO))
    for each in (gate, FrameAuthenticator(Store(store.folder), fleet="barn")):
        assert reason(each, signed(key=TWO)) == "signature"
        each.check("a", signed())
    assert {name: key.public for name, key in store.keys.all().items()} == {
        "a": public_key(ONE), "b": public_key(TWO)
    }  # fmt: skip


@pytest.mark.parametrize(
    "frame",
    [
        FRAME,
        msgspec.structs.replace(signed(), signature=b""),
        msgspec.structs.replace(signed(), key=b"short"),
        msgspec.structs.replace(signed(), key=public_key(TWO)),
        msgspec.structs.replace(signed(), digest=digest_of(b"another")),
        msgspec.structs.replace(signed(), size_bytes=8),
        signed("b"),
        signed(fleet="shed"),
    ],
    ids=[
        "unsigned",
        "no signature",
        "no key",
        "other key",
        "other payload",
        "other size",
        "other device",
        "other fleet",
    ],
)
def test_what_a_device_has_not_signed_is_refused_and_leaves_nothing(store: Store, frame: Frame) -> None:
    """Whatever is wrong with it; the name stays free for whose it is."""
    gate = FrameAuthenticator(store, fleet="barn")
    assert reason(gate, frame) == "signature"
    assert store.keys.all() == {}
    gate.check("a", signed())


def test_in_a_closed_fleet_only_enrolled_keys_count(store: Store) -> None:
    """Also what was taken at first use before counts no more; another process may close it and let in."""
    gate = FrameAuthenticator(store, fleet="barn")
    gate.check("a", signed())
    other = Store(store.folder)
    other.keys.close_fleet()
    for device in ("a", "b"):
        assert reason(gate, signed(device), device) == "unknown_device"
        with pytest.raises(Refused, match="aggregator enroll"):
            gate.check_name(device)
    other.keys.enroll("a", public_key(TWO), serial="7f", now_s=1.0)
    gate.check_name("a")
    gate.check("a", signed(key=TWO))
    assert reason(gate, signed()) == "signature"
    assert store.keys.get("a") == Key(public_key(TWO), enrolled=True, since_s=1.0, serial="7f")


def test_a_revoked_key_counts_no_more_from_that_moment(store: Store) -> None:
    """Of a transfer that is under way as well; a new enrollment lets the device in again."""
    gate, other = FrameAuthenticator(store, fleet="barn"), Store(store.folder)
    gate.check("a", signed())
    other.keys.revoke("a", now_s=5.0)
    assert reason(gate, signed()) == "revoked"
    assert reason(gate, signed(key=TWO)) == "revoked"
    assert not other.keys.reset("a")
    other.keys.enroll("a", public_key(TWO), now_s=6.0)
    gate.check("a", signed(key=TWO))


def test_what_another_process_revokes_counts_with_the_next_batch(store: Store) -> None:
    """Within one, nobody else can write, and so the keys are looked at once; after one, each time again."""
    gate, other = FrameAuthenticator(store, fleet="barn"), Store(store.folder)
    with store.transaction():
        gate.check("a", signed())
        gate.check("a", signed())
    other.keys.revoke("a", now_s=5.0)
    with store.transaction():
        assert reason(gate, signed()) == "revoked"
    other.keys.enroll("a", public_key(TWO), now_s=6.0)
    with store.transaction():
        gate.check("a", signed(key=TWO))
    other.keys.revoke("a", now_s=7.0)
    assert reason(gate, signed(key=TWO)) == "revoked"


def test_a_device_that_has_lost_its_key_comes_with_another_one(store: Store) -> None:
    """Once its old one is forgotten; an enrolled key is not forgotten so."""
    gate = FrameAuthenticator(store, fleet="barn")
    gate.check("a", signed())
    assert store.keys.reset("a")
    gate.check("a", signed(key=TWO))
    store.keys.enroll("a", public_key(ONE), now_s=0.0)
    assert not store.keys.reset("a")
    assert not store.keys.reset("nobody")


def test_strangers_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of names that anybody can make up only so many are taken; enrolled devices come on top of them."""
    monkeypatch.setattr(device_keys, "MAX_PINNED_DEVICES", 3)
    gate = FrameAuthenticator(store, fleet="barn")
    store.keys.enroll("z", public_key(TWO), now_s=0.0)
    for device in ("a", "b", "c"):
        gate.check(device, signed(device))
    assert reason(gate, signed("d"), "d") == "unknown_device"
    assert store.keys.get("d") is None
    gate.check("a", signed())
    gate.check("z", signed("z", key=TWO))
    assert device_keys.counts(store.keys.all().values()) == {"enrolled": 1, "first_use": 3, "revoked": 0}


def test_a_key_whose_keeping_was_undone_is_kept_again(store: Store) -> None:
    """What a batch has brought is all stored, or never came."""
    gate = FrameAuthenticator(store, fleet="barn")

    def batch() -> None:
        with store.transaction():
            gate.check("a", signed())
            gate.check("a", signed())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        batch()
    store.keys.drop_cache()
    gate.check("a", signed())
    assert Store(store.folder).keys.all().keys() == {"a"}


def test_a_key_is_not_kept_while_nothing_can_be_stored(store: Store) -> None:
    """The frame is looked at all the same."""
    gate = FrameAuthenticator(store, fleet="barn")
    gate.check("a", signed(), may_pin=False)
    assert store.keys.all() == {}
    with pytest.raises(Refused):
        gate.check("a", FRAME, may_pin=False)


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize(
    "known", [None, Key(ONE, enrolled=False, since_s=0.0), Key(ONE, enrolled=True, since_s=0.0)]
)
def test_a_name_is_heard_if_and_only_if_its_key_would_be(known: Key | None, *, is_closed: bool) -> None:
    """Where nothing is signed, the name decides as it does where the right key comes with it."""
    assert refusal_reason(known, is_closed=is_closed) == refusal_reason(
        known, is_closed=is_closed, public=ONE
    )


def test_another_key_comes_with_a_way_out(store: Store) -> None:
    """Who reads the refusal is told the command or the folder that mends it."""
    gate = FrameAuthenticator(store, fleet="barn")
    gate.check("a", signed())
    with pytest.raises(Refused, match="`aggregator reset-key a`"):
        gate.check("a", signed(key=TWO))
    store.keys.enroll("a", public_key(TWO), now_s=1.0)
    with pytest.raises(Refused, match="with the folder of its last enrollment"):
        gate.check("a", signed())
