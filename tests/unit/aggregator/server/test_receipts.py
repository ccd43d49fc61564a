"""The answers to uploads by their verdict; without rounds, heads, a network or processes."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from aggregator.config.schema import TaskFile
from aggregator.intake.accepted_submissions import AcceptedSubmissions
from aggregator.intake.uploads import Uploads
from aggregator.server.device_messages import DeviceMessages
from aggregator.server.store_view import StoreView
from aggregator.storage.store import Store
from aggregator.storage.stored_values import IntakeHeads, RoundRequest
from aggregator.tasks.task_preparation import Task
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import Evaluation, Receipt, Submission
from protocol.wire.topics import device_topic
from protocol.wire.transfer import frames_of
from tests.support.fleets.aggregator_process import FLEET, signed
from tests.support.messages.submissions import (
    IN_ROUNDS,
    ROUNDS_EXPECTATION,
    ROUNDS_TASK,
    evaluation,
    round_submission,
)

FILE = msgspec.convert(
    {
        "fleet": FLEET,
        "classes": IN_ROUNDS.classes,
        "backbones": ["tiny.onnx"],
        "algorithm": "fpl",
        "fpl": {"rounds": 5},
        "rounds": {"staleness": 1},
    },
    TaskFile,
)


class Bench:
    """The handler of messages with a store in which round 2 is open."""

    def __init__(self, store: Store) -> None:
        self.store = store
        task = Task(file=FILE, feature_size=16, expectation=ROUNDS_EXPECTATION, first_tensors=None).intake
        blob_sender: Any = SimpleNamespace(request=lambda *_: 0.0)
        self.uploads = Uploads(store, max_bytes=10**6, unfinished_s=3600.0)
        self.view = StoreView(store, task)
        self.open_round(2)
        self.messages = DeviceMessages(
            task=task,
            expectation=ROUNDS_EXPECTATION,
            store=store,
            uploads=self.uploads,
            view=self.view,
            accepted=AcceptedSubmissions(task.digest, task.settings, store),
            blob_sender=blob_sender,
        )

    def open_round(self, number: int) -> None:
        """Open a round, whose number is the newest head's."""
        self.view.heads = IntakeHeads(ROUNDS_TASK, number, frozenset({2}), frozenset())

    def upload(self, message: Submission | Evaluation) -> Receipt:
        """Hand over all frames of a message; returns the only receipt."""
        payload = encode(message)
        for frame in frames_of(payload, digest=digest_of(payload)):
            self.messages.read(device_topic(FLEET, "dev", "up"), signed(frame))
            self.messages.store_items()
        self.uploads.commit()
        ((device, receipt),) = self.messages.receipts
        self.messages.receipts.clear()
        assert (device, receipt.digest) == ("dev", digest_of(payload))
        return receipt


@pytest.fixture
def bench(store: Store) -> Bench:
    """A new fleet."""
    return Bench(store)


def test_each_verdict_has_its_receipt(bench: Bench) -> None:
    """A repeated upload is received again; an older one is answered by the sequence that counts."""
    newest = round_submission(number=2, sequence=5)
    assert [bench.upload(newest).status for _ in range(2)] == ["received"] * 2
    older = bench.upload(round_submission(number=2, sequence=4, seed=1))
    assert (older.status, older.reason, older.sequence) == ("refused", "superseded", 5)
    late = bench.upload(round_submission(number=0))
    assert (late.reason, late.detail) == ("late", "the submission is for round 0, but round 2 is open")
    assert bench.store.facts.get(RoundRequest) is None
    assert bench.upload(round_submission(number=3)).reason == "unknown_round"
    assert bench.store.facts.get(RoundRequest) is not None
    stored = bench.store.submissions.get(ROUNDS_TASK, "dev")
    assert stored is not None
    assert stored.entry.digest == digest_of(encode(newest))


def test_a_refused_round_counts_once_it_is_open(bench: Bench) -> None:
    """The same upload is refused, then received; after the last round, nothing is."""
    early = round_submission(number=3)
    assert bench.upload(early).reason == "unknown_round"
    bench.open_round(3)
    assert bench.upload(early).status == "received"
    bench.open_round(5)
    assert bench.upload(round_submission(number=4)).detail.endswith("but all 5 rounds are over")


def test_evaluations_of_retained_heads_only_are_stored(bench: Bench, store: Store) -> None:
    """Those of other heads are received and dropped; one of a head that does not exist is refused."""
    for version, status in ((1, "received"), (2, "received"), (3, "refused")):
        assert bench.upload(evaluation(task=ROUNDS_TASK, head_version=version)).status == status
    assert store.evaluations.of_head(ROUNDS_TASK, 2).keys() == {"dev"}
