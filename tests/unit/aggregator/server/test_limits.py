"""Limits of what a device causes, and the token buckets behind them."""

import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator import rates as token_buckets
from aggregator.intake.accepted_submissions import AcceptedSubmissions
from aggregator.rates import LINES_AT_ONCE, DeviceEvents, TokenBuckets
from aggregator.server.announcements import Announcements
from aggregator.server.device_messages import RECEIPTS_AT_ONCE, DeviceMessages, _Upload
from aggregator.server.store_view import IntakeHeads, StoreView
from aggregator.storage.store import Store
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRequest, Evaluation
from protocol.wire.topics import device_topic
from tests.support.messages.submissions import EXPECTATION, MANIFEST, TASK, device_info, evaluation
from tests.support.messages.tasks import served_task

HEADS = 50


@pytest.fixture
def messages(store: Store) -> DeviceMessages:
    """The handler of a fleet with many heads, of which the last five are retained."""
    parts: Any = SimpleNamespace(is_stopped=False, request=lambda *_: 60.0, count_refusal=lambda *_: None)
    task = served_task(EXPECTATION, fleet="f")
    view = StoreView(store, task)
    retained = frozenset(range(HEADS - 4, HEADS + 1))
    view.heads = IntakeHeads(HEADS, retained, frozenset({bytes(32)}))
    return DeviceMessages(
        task=task,
        store=store,
        uploads=parts,
        view=view,
        accepted=AcceptedSubmissions(task.digest, task.file.settings, store),
        blob_sender=parts,
        key=bytes(32),
    )


def _evaluate(messages: DeviceMessages, sent: Evaluation) -> None:
    payload = encode(sent)
    messages._store_evaluation("a", sent, _Upload(digest_of(payload), payload, sent, None))


def test_an_earlier_evaluation_takes_the_place_of_a_later_one(store: Store, messages: DeviceMessages) -> None:
    """A broker's operator can repeat a signed one, and so withhold the later one. It counts once."""
    earlier = evaluation(task=TASK, head_version=HEADS)
    later = msgspec.structs.replace(earlier, problem="it fails")
    for sent in (earlier, later, earlier):
        _evaluate(messages, sent)
        assert store.evaluations.of_head(TASK, HEADS) == {"a": sent}


def test_lines_about_changing_problems_are_limited(
    store: Store, messages: DeviceMessages, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that reports another problem each time; the last one is in `status`."""
    caplog.set_level(logging.INFO)
    for number in range(3 * LINES_AT_ONCE):
        info = device_info(problem=f"problem {number}")
        messages.read(device_topic("f", "a", "info"), encode(info))
        messages.store_items()
        _evaluate(
            messages, msgspec.structs.replace(evaluation(head_version=HEADS), problem=f"problem {number}")
        )
    for text in ("device cannot take part", "head not used"):
        assert LINES_AT_ONCE <= sum(text in line for line in caplog.messages) < 2 * LINES_AT_ONCE
    (device,) = store.devices.all()
    assert device.info is not None
    assert device.info.problem == f"problem {3 * LINES_AT_ONCE - 1}"


def test_receipts_are_limited(messages: DeviceMessages) -> None:
    """A device that sends the same request all the time gets a bounded number of answers: they wait for the broker.

    Other devices get theirs, and so does this one to other messages.
    """

    def request(device: str, digest: bytes) -> None:
        message = BlobRequest(digest=digest, offset=0, length=1)
        messages.read(device_topic("f", device, "get"), encode(message))

    for _ in range(3 * RECEIPTS_AT_ONCE):
        request("a", b"x" * 32)
    assert RECEIPTS_AT_ONCE <= len(messages.receipts) < 2 * RECEIPTS_AT_ONCE
    messages.receipts.clear()
    request("a", bytes(32))
    request("b", b"x" * 32)
    assert [(device, receipt.reason) for device, receipt in messages.receipts] == [  # type: ignore[union-attr]
        ("a", "rate_limited"),
        ("b", "unknown_blob"),
    ]


def test_devices_cannot_make_the_aggregator_repeat_the_round(store: Store) -> None:
    """Each repetition goes to all devices: however many uploads ask for it, it is published once."""
    published: list[str] = []
    parts: Any = SimpleNamespace(
        round=None,
        publish_to_fleet=lambda channel, _: published.append(channel),
        file=SimpleNamespace(fleet="f"),
        manifest=MANIFEST,
    )
    announcements = Announcements(
        task=parts,
        store=store,
        key=b"k" * 32,
        publisher=parts,
        uploads=parts,
        training=parts,
        releases=parts,
        files=parts,
    )
    for _ in range(100):
        announcements.repeat_round()
    assert published == ["round"]


log = logging.getLogger(__name__)

_takings = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 6)), max_size=60)


@given(_takings)
def test_tokens_taken_in_any_span_are_bounded(takings: list[tuple[float, float]]) -> None:
    """The bound is the capacity and what was refilled; a request that is refused takes none."""
    buckets, now_s = TokenBuckets[str](capacity=5, per_s=0.5), 0.0
    taken: list[tuple[float, float]] = []
    for pause_s, tokens in takings:
        now_s += pause_s
        wait_s = buckets.wait_s("a", tokens, now_s=now_s)
        if buckets.take("a", tokens, now_s=now_s):
            taken.append((now_s, tokens))
            assert wait_s == 0
        else:
            assert wait_s > 0
    for index, (since_s, _) in enumerate(taken):
        for end, (until_s, _) in enumerate(taken[index:], start=index + 1):
            assert sum(tokens for _, tokens in taken[index:end]) <= 5 + 0.5 * (until_s - since_s) + 1e-6


def test_buckets_are_independent_and_refill() -> None:
    buckets = TokenBuckets[str](capacity=2, per_s=0.1)
    assert [buckets.take("a", now_s=0.0) for _ in range(3)] == [True, True, False]
    assert buckets.take("b", now_s=0.0)
    assert buckets.wait_s("a", now_s=4.0) == pytest.approx(6.0)
    assert [buckets.take("a", now_s=now_s) for now_s in (9.0, 10.0, 11.0)] == [False, True, False]
    assert not buckets.take("c", 3, now_s=0.0)


def test_number_of_buckets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one used least recently is dropped, and full again."""
    monkeypatch.setattr(token_buckets, "MAX_KEYS", 3)
    buckets = TokenBuckets[int](capacity=1, per_s=1.0)
    assert all(buckets.take(key, now_s=0.0) for key in range(4))
    assert buckets.left(0) is None
    assert not any(buckets.take(key, now_s=0.0) for key in (1, 2, 3))


def test_lines_of_a_device_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    """Per message; other devices' and other messages are logged, and the next line has the number omitted."""
    now_s = 0.0
    caplog.set_level(logging.INFO, logger=log.name)
    events = DeviceEvents(log, clock=lambda: now_s)
    for number in range(100_000):
        events.event(logging.WARNING, "device cannot take part", device="mallory", reason=number)
    assert len(caplog.messages) == LINES_AT_ONCE
    events.event(logging.INFO, "head in use", device="mallory")
    events.event(logging.WARNING, "device cannot take part", device="honest", reason="x")
    events.event(logging.DEBUG, "device cannot take part", device="honest", frame=b"")
    assert caplog.messages[-2:] == [
        "head in use device=mallory",
        "device cannot take part device=honest reason=x",
    ]
    now_s = 60.0
    events.event(logging.WARNING, "device cannot take part", device="mallory", reason="y")
    assert caplog.messages[-1] == "device cannot take part device=mallory reason=y omitted_before=99900"
