"""Joining: links, requests without the secret, and answers of others than the aggregator."""

import contextlib
import functools
import json
from collections.abc import Iterable
from pathlib import Path

import msgspec

from aggregator.http.challenges import Challenges
from aggregator.security.joining import answer_join, make_link
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from protocol.errors import BadSignature, ConfigError
from protocol.wire.codec import digest_of
from protocol.wire.joining import JoinLink, open_answer, parse_link, signed_request
from protocol.wire.signing import public_key, sign_joined
from tests.fuzz.devices import state_folder
from tests.fuzz.target import MIB, Target

FLEET, DEVICE = "shed", "phone-1"
KEY = digest_of(b"key of an aggregator")
LINK = JoinLink(
    address="https://host", fleet=FLEET, key=public_key(KEY), secret=bytes(16), broker="broker:8883"
)
REQUEST = signed_request(LINK, DEVICE, "phone", key=bytes(32))


@functools.cache
def _store() -> tuple[Store, JoinLink, Challenges]:
    """Return a state directory with a link that nobody has, and a gateway's challenges."""
    store = open_store(Path(state_folder().name) / "joining", lock=True)
    return store, make_link(store, address="https://host", fleet=FLEET), Challenges(lambda: 0.0)


def join_any(data: bytes) -> None:
    """Read bytes as each side does: no one joins or connects, and nothing but the documented errors is raised."""
    store, _, challenges = _store()
    text = data.decode(errors="replace")
    with contextlib.suppress(ConfigError):
        link = parse_link(text)
        assert len(link.key) == 32
        assert parse_link(str(link)) == link
    assert not challenges.use(text)
    with contextlib.suppress(msgspec.MsgspecError, ConfigError, RecursionError):
        answer_join(store, data, fleet=FLEET)
        raise AssertionError("enrolled without the secret")
    signed = {"answer": text, "signature": sign_joined(text, key=KEY).hex()}
    for answer in (data, json.dumps(signed).encode()):
        with contextlib.suppress(BadSignature):
            opened = open_answer(answer, link=LINK, request=REQUEST)
            assert (opened.device, opened.key) == (DEVICE, REQUEST.key)


def _seeds() -> Iterable[bytes]:
    _, link, challenges = _store()
    yield str(LINK).encode()
    yield str(LINK).replace("#", "?").encode()
    yield challenges.make().replace("0", "1").encode()
    without_secret = msgspec.structs.replace(
        REQUEST, id=signed_request(link, DEVICE, "phone", key=bytes(32)).id
    )
    yield msgspec.json.encode(without_secret)
    yield (
        b'{"fleet":"shed","device":"phone-1","key":"'
        + b"0" * 64
        + b'","request":"'
        + b"0" * 64
        + (b'","aggregator_key_number":0,"root_key":"","broker":""}')
    )
    yield b'{"x":' + b"[" * 2000


JOINING = Target("joining", join_any, _seeds, bytes_per_byte=256, at_least_bytes=2 * MIB, share=0.2)
