"""The outbox: every item stays until it is acknowledged, whatever fails in between."""

import itertools
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.agent.state import UploadItem
from edge_client.storage.device_state import DeviceState
from edge_client.storage.outbox_size import MIB
from edge_client.storage.stored_values import Epoch, EvaluatedHead, SubmissionSequence
from protocol.errors import ProtofleetError, StateError
from protocol.wire.codec import digest_of
from tests.support.machine_faults import full_disk

TASK = b"t" * 32
KEY = "ab" * 32


class Unstorable(msgspec.Struct):
    value: object


@pytest.fixture
def state(tmp_path: Path) -> DeviceState:
    return DeviceState(tmp_path)


def keep(state: DeviceState, payload: bytes, *, number: int = 0) -> UploadItem:
    """Put a submission into the outbox, with its number as a fact."""
    facts = (SubmissionSequence(number),)
    return state.outbox.keep("submission", payload, task=TASK, about="made of this", facts=facts)


def number_of(state: DeviceState) -> int:
    """Return the number stored with the newest submission."""
    return state.get(SubmissionSequence).number


@given(payload=st.binary(min_size=1, max_size=2000), cuts=st.lists(st.integers(0, 2000), max_size=6))
@settings(max_examples=30, deadline=None)
def test_any_ranges_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, payload: bytes, cuts: list[int]
) -> None:
    """A program that was started again reads them too."""
    folder = tmp_path_factory.mktemp("state")
    item = keep(DeviceState(folder), payload)
    assert (item.digest, item.size_bytes) == (digest_of(payload), len(payload))
    bounds = sorted(min(cut, len(payload)) for cut in cuts)
    ranges = tuple(itertools.pairwise(bounds))
    again = DeviceState(folder)
    assert again.outbox.items() == (item,)
    assert again.outbox.read(item.digest, ranges) == [payload[start:stop] for start, stop in ranges]
    assert again.outbox.read(b"n" * 32, ranges) is None


def test_newer_item_replaces_the_waiting_one(state: DeviceState) -> None:
    """The one acknowledged last stays until another is: the aggregator may ask for it again."""
    first = keep(state, b"first", number=1)
    second = keep(state, b"second", number=2)
    assert state.outbox.items() == (second,)
    assert not state.outbox.receive(first.digest)
    assert state.outbox.receive(second.digest)
    received = state.outbox.newest_submission()
    assert received is not None
    assert (received.digest, received.received) == (second.digest, True)
    third = keep(state, b"third", number=3)
    assert state.outbox.newest_submission() == third
    assert state.outbox.items() == (third, received)
    assert state.outbox.payload(received) == b"second"
    assert state.outbox.receive(third.digest)
    assert [item.digest for item in state.outbox.items()] == [third.digest]
    assert not state.outbox.receive(third.digest)
    assert number_of(state) == 3


def test_acknowledged_evaluation_is_deleted(state: DeviceState) -> None:
    """Facts are stored with both."""
    submission = keep(state, b"submission")
    evaluation = state.outbox.keep("evaluation", b"5 correct", task=TASK, about=KEY, facts=(Epoch(7),))
    assert evaluation.head == bytes.fromhex(KEY)
    assert submission.head is None
    assert state.outbox.items() == (submission, evaluation)
    assert state.outbox.receive(evaluation.digest, facts=(EvaluatedHead(bytes.fromhex(KEY)),))
    assert state.outbox.items() == (submission,)
    assert (state.get(Epoch).number, state.get(EvaluatedHead).key.hex()) == (7, KEY)


def test_submission_above_the_limit_is_refused(tmp_path: Path) -> None:
    """The earlier submission stays, with its facts."""
    state = DeviceState(tmp_path, outbox_bytes=100)
    there = keep(state, b"x" * 100, number=1)
    with pytest.raises(ProtofleetError, match=r"submission has 101 bytes .* holds 100: raise --outbox-mb"):
        keep(state, b"y" * 101, number=2)
    assert state.outbox.items() == (there,)
    assert number_of(state) == 1
    assert keep(DeviceState(tmp_path, outbox_bytes=200), b"y" * 101).size_bytes == 101


def test_full_disk_leaves_the_old_item_or_the_new_one(tmp_path: Path, state: DeviceState) -> None:
    """The facts stored with the item are of the same one."""
    outcomes = set()
    before = keep(state, b"old" * 1000, number=1)
    size = (tmp_path / "device.sqlite-wal").stat().st_size
    for room in range(0, size + 200_000, 10_000):
        try:
            with full_disk(after_bytes=room):
                now = keep(state, b"new%d" % room * 3000, number=2 + room)
        except StateError:
            outcomes.add("old")
        else:
            before = now
            outcomes.add("new")
        for each in (state, DeviceState(tmp_path)):
            assert each.outbox.items() == (before,)
            assert digest_of(each.outbox.payload(before) or b"") == before.digest
    assert outcomes == {"old", "new"}


def test_unstorable_fact_leaves_the_old_item(state: DeviceState) -> None:
    there = keep(state, b"old", number=1)
    with pytest.raises(TypeError):
        state.outbox.keep("submission", b"new", task=TASK, about="", facts=(Unstorable(object()),))
    assert state.outbox.items() == (there,)
    newer = keep(state, b"newer", number=2)
    assert (state.outbox.items(), number_of(state)) == ((newer,), 2)


def test_damaged_item_is_deleted(tmp_path: Path, state: DeviceState) -> None:
    damaged = keep(state, b"damaged" * 1000)
    whole = state.outbox.keep("evaluation", b"5 correct", task=TASK, about=KEY)
    assert state.outbox.drop_damaged() == []
    with sqlite3.connect(tmp_path / "device.sqlite") as other:
        other.execute("UPDATE payloads SET bytes = zeroblob(7000) WHERE length(bytes) = 7000")
    again = DeviceState(tmp_path)
    assert again.outbox.payload(damaged) is None
    assert again.outbox.drop_damaged() == [damaged]
    assert again.outbox.items() == (whole,)


_KEEP = """
import pathlib, sys
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import Epoch, SubmissionSequence

state = DeviceState(pathlib.Path(sys.argv[1]))
number = state.get(SubmissionSequence).number
while True:
    number += 1
    payload = b"%8d" % number * 40_000
    item = state.outbox.keep(
        "submission", payload, task=b"t" * 32, about=str(number), facts=(SubmissionSequence(number),)
    )
    print(number, flush=True)
    if number % 3 == 0:
        state.outbox.receive(item.digest, facts=(Epoch(number),))
"""


@pytest.mark.parametrize("seed", range(3))
def test_killed_program_leaves_the_last_item_or_the_next(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", _KEEP, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(chance.randint(1, 8)):
            process.stdout.readline()
        time.sleep(chance.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        said = [int(line) for line in process.stdout.read().split()]
        process.wait()
        state = DeviceState(tmp_path)
        number = number_of(state)
        newest = state.outbox.newest_submission()
        assert newest is not None
        assert number in ({said[-1], said[-1] + 1} if said else {number})
        assert newest.about == str(number)
        assert state.outbox.payload(newest) == b"%8d" % number * 40_000
        received = [item.about for item in state.outbox.items() if item.received]
        acknowledged = state.get(Epoch).number
        assert received == ([str(acknowledged)] if acknowledged else [])
        assert state.outbox.drop_damaged() == []


def test_file_size_is_bounded(tmp_path: Path, state: DeviceState) -> None:
    """There is room for two submissions, and for the log of the last transaction."""
    for number in range(12):
        item = keep(state, bytes([number]) * MIB)
        if number % 2:
            state.outbox.receive(item.digest)
    with sqlite3.connect(tmp_path / "device.sqlite") as other:
        assert other.execute("SELECT count(*) FROM payloads").fetchone() == (1,)
    used = sum(file.stat().st_size for file in tmp_path.glob("device.sqlite*"))
    assert used < 6 * MIB
