"""Limits of the log lines, rows and answers that a device causes; without a network or processes."""

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from aggregator.config.schema import TaskFile
from aggregator.intake.accepted_submissions import AcceptedSubmissions
from aggregator.rates import LINES_AT_ONCE
from aggregator.server.announcements import Announcements
from aggregator.server.device_messages import RECEIPTS_AT_ONCE, DeviceMessages
from aggregator.server.store_view import StoreView
from aggregator.storage.store import Store
from aggregator.storage.stored_values import IntakeHeads
from aggregator.tasks.task_preparation import Task
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRequest, Evaluation
from protocol.wire.topics import device_topic
from tests.support.messages.submissions import EXPECTATION, MANIFEST, TASK, device_info, evaluation

HEADS = 50


@pytest.fixture
def messages(store: Store) -> DeviceMessages:
    """The handler of a fleet with many heads, of which the last five are retained."""
    parts: Any = SimpleNamespace(
        is_stopped=False,
        request=lambda *_: 60.0,
        count_refusal=lambda *_: None,
    )
    file = TaskFile(classes=MANIFEST.classes, backbones=("tiny.onnx",), fleet="f")
    task = Task(file=file, feature_size=16, expectation=EXPECTATION, first_tensors=None).intake
    view = StoreView(store, task)
    retained = frozenset(range(HEADS - 4, HEADS + 1))
    view.heads = IntakeHeads(task.digest, HEADS, retained, frozenset({bytes(32)}))
    return DeviceMessages(
        task=task,
        expectation=EXPECTATION,
        store=store,
        uploads=parts,
        view=view,
        accepted=AcceptedSubmissions(task.digest, task.settings, store),
        blob_sender=parts,
    )


def _evaluate(messages: DeviceMessages, sent: Evaluation) -> None:
    messages._store_evaluation("a", sent, digest_of(encode(sent)))


def test_evaluations_of_unused_heads_are_not_stored(store: Store, messages: DeviceMessages) -> None:
    """A device that evaluates every head that ever was, with problems, leaves a row for each retained one."""
    for version in range(1, HEADS + 1):
        for number in range(3):
            sent = evaluation(task=TASK, head_version=version)
            _evaluate(messages, msgspec.structs.replace(sent, problem=f"problem {number}"))
    assert store.database.read("SELECT count(*) FROM evaluations") == [(5,)]


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
    assert [(device, receipt.reason) for device, receipt in messages.receipts] == [
        ("a", "rate_limited"),
        ("b", "unknown_blob"),
    ]


def test_devices_cannot_make_the_aggregator_repeat_the_round(store: Store) -> None:
    """Each repetition goes to all devices: however many uploads ask for it, it is published once."""
    published: list[str] = []
    parts: Any = SimpleNamespace(
        round=None,
        guard=contextlib.nullcontext,
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
        restoration=parts,
    )
    for _ in range(100):
        announcements.repeat_round()
    assert published == ["round"]
