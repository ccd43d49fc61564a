"""Requests for sums at the second operator, and its replies at the aggregator: only whole, signed lists are opened."""

import functools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.sums.second_operator import SecondOperatorLists
from aggregator.sums.stored_lists import PendingList, SumLists, put_sums, sums_of
from protocol.statistics.noisy_sums import released_values
from protocol.storage.keyfile import pem_of, write_private
from protocol.storage.state_folder import make_state_folder
from protocol.wire.arrays import to_array, to_tensor
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import MAX_RELEASED, SecondOperator, SumReply, SumRequest, Tensor
from protocol.wire.signing import is_own_sum, public_key, sign_sum
from protocol.wire.transfer import frames_of
from sums_operator.checks import Policy
from sums_operator.service import Operator
from sums_operator.state import Keys, OperatorState
from tests.fuzz.devices import state_folder
from tests.fuzz.mutations import of_message
from tests.fuzz.target import MIB, Target
from tests.support.messages.sums import FLEET, NAMES, signing_key, sum_of, sum_request
from tests.support.messages.tasks import served_task

SIGN = bytes([2]) * 32
SEAL = X25519PrivateKey.from_private_bytes(bytes([1]) * 32)
SEAL_KEY = SEAL.public_key().public_bytes_raw()
DEVICES = {name: public_key(signing_key(name)) for name in NAMES}
SHOWN = 10_000
"""Values of a sum that Python's integers check."""


@functools.cache
def _operator() -> tuple[OperatorState, Operator]:
    folder = Path(state_folder().name) / "sums"
    make_state_folder(folder)
    state = OperatorState(folder, is_new=True)
    keys = Keys(SIGN, folder / "seal-keys")
    write_private(keys.folder / f"{SEAL_KEY.hex()}.key", pem_of(SEAL))
    return state, Operator(keys, state, Policy(FLEET, 3, DEVICES))


def request(data: bytes) -> None:
    """Answer a request: with the exact sum of at least three known devices, or with a refusal."""
    state, operator = _operator()
    with state._database.transaction() as database:
        database.execute("DELETE FROM members")
        database.execute("DELETE FROM lists")
    reply = operator.answer(data)
    assert is_own_sum(reply, public=public_key(SIGN), fleet=FLEET)
    if not isinstance(reply.masks, Tensor):
        assert reply.problem
        return
    asked = decode(data, SumRequest, max_bytes=len(data))
    devices = [each.device for each in asked.submissions]
    assert len(set(devices) & DEVICES.keys()) == len(devices) >= 3
    np.testing.assert_array_equal(to_array(reply.masks)[:SHOWN], sum_of(devices, min(asked.values, SHOWN)))


REQUEST = digest_of(b"request")
TASK = served_task(fleet=FLEET)
LISTS = SumLists(TASK.digest, pending=PendingList(dict.fromkeys(NAMES, "00" * 32), REQUEST.hex(), 0.0, "00"))
VALUES = sum(
    released_values(classes=len(TASK.manifest.classes), size=TASK.expectation.prototype_size).values()
)


@functools.cache
def _lists() -> tuple[Store, SecondOperatorLists]:
    store = open_store(Path(state_folder().name) / "lists")
    keys = {"seal_key": SEAL_KEY, "sign_key": public_key(SIGN), "aggregator_key": SEAL_KEY}
    by = SecondOperator(**keys, seal_key_signature=bytes(64), min_devices=3, honest=1)
    return store, SecondOperatorLists(TASK.expectation, store, by, fleet=FLEET)


def reply(data: bytes) -> None:
    """Take a reply, and bytes in the place of its frame: a list is opened by a signed sum of its values only."""
    store, lists = _lists()
    put_sums(store.facts, LISTS)
    frames = frames_of(data, digest=digest_of(data), chunk_bytes=700) if data else ()
    refusal = [lists.take(each) for each in (data, *map(encode, frames))][-1]
    pending = sums_of(store.facts, TASK.digest).pending
    assert pending is not None
    assert bool(refusal) == bool(pending.problem)
    if pending.masks or pending.problem:
        taken = decode(data, SumReply, max_bytes=len(data))
        assert is_own_sum(taken, public=public_key(SIGN), fleet=FLEET)
        assert not pending.masks or to_array(taken.masks).shape == (VALUES,)  # type: ignore[arg-type]


def _requests() -> Iterable[bytes]:
    for devices, options in (
        (NAMES[:3], {}),
        (NAMES, {"min_devices": 6}),
        (NAMES[:2], {}),
        (NAMES, {"fleet": "x"}),
        (NAMES, {"values": 41}),
    ):
        yield encode(sum_request(devices, seal_key=SEAL_KEY, **options))


def _replies() -> Iterable[bytes]:
    for values in (VALUES, VALUES - 1):
        whole = SumReply(request=REQUEST, masks=to_tensor(np.arange(values, dtype=np.uint32)))
        yield encode(whole)
        yield encode(sign_sum(whole, key=SIGN, fleet=FLEET))
    yield encode(sign_sum(SumReply(request=REQUEST, problem="none"), key=SIGN, fleet=FLEET))


SUM_REQUESTS = Target(
    "sum_requests", request, _requests, of_message(), at_least_bytes=12 * MAX_RELEASED + MIB, share=0.5
)
SUM_REPLIES = Target("sum_replies", reply, _replies, of_message(), max_bytes=8192, share=0.5)
