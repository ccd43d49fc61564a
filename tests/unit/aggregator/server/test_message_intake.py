"""Messages of devices with what another process has stored about rounds and heads, and the bytes that they have."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from aggregator.algorithms.fpl import FPL
from aggregator.config.schema import Limits, Rounds
from aggregator.intake.uploads import Uploads
from aggregator.server import device_messages
from aggregator.server.device_messages import DeviceMessages
from aggregator.server.message_intake import MessageIntake, TaskReplaced, TrafficMeter
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import IntakeHeads, IntakeTask, RoundRequest, Traffic
from protocol.mqtt.reconnecting_session import Received
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import Evaluation, Receipt, Submission
from protocol.wire.signing import public_key
from protocol.wire.topics import device_topic
from protocol.wire.transfer import frames_of
from tests.support.fleets.aggregator_process import FLEET, key_of, presence_of, signed
from tests.support.messages.submissions import IN_ROUNDS, ROUNDS_EXPECTATION, evaluation, round_submission
from tests.support.messages.tasks import served_task

if TYPE_CHECKING:
    from tests.support.databases.postgresql import PostgreSQL

TASK = served_task(
    ROUNDS_EXPECTATION, fleet=FLEET, algorithm="fpl", fpl=FPL(rounds=9), rounds=Rounds(staleness=1)
).intake


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """The store of a coordinator in which round 2 is open."""
    url = ""
    if request.param == "postgresql":
        server: PostgreSQL = request.getfixturevalue("postgresql")
        url = server.url
    with contextlib.closing(open_store(tmp_path, database=url, fleet=tmp_path.name if url else "")) as opened:
        opened.facts.put(TASK)
        opened.facts.put(IntakeHeads(TASK.digest, 2, frozenset({2}), frozenset()))
        yield opened


class Bench:
    """The intake of one of several programs."""

    def __init__(self, store: Store, task: IntakeTask = TASK) -> None:
        blob_sender: Any = SimpleNamespace(request=lambda *_: 0.0)
        publisher: Any = SimpleNamespace(publish_to_device=lambda *sent: self.sent.append(sent))
        self.sent: list[tuple[str, str, Receipt]] = []
        self.intake = MessageIntake(
            store,
            task,
            IN_ROUNDS,
            uploads=Uploads(store, max_bytes=10**6, unfinished_s=3600.0),
            publisher=publisher,
            blob_sender=blob_sender,
        )

    def handle(self, *messages: tuple[str, bytes]) -> list[tuple[str, Receipt]]:
        """Handle a batch, and return its receipts."""
        self.intake.handle([Received(topic, payload) for topic, payload in messages])
        sent, self.sent[:] = [*self.sent], []
        return [(device, receipt) for device, _, receipt in sent]


def _upload(message: Submission | Evaluation, device: str = "dev") -> list[tuple[str, bytes]]:
    payload = encode(message)
    topic = device_topic(FLEET, device, "up")
    return [(topic, signed(frame, device)) for frame in frames_of(payload, digest=digest_of(payload))]


@pytest.mark.parametrize("is_known", [False, True])
def test_a_batch_is_stored_in_one_transaction(store: Store, *, is_known: bool) -> None:
    """Uploads, presences and refusals, of devices whose key is known or not; a repeated upload is stored once."""
    bench = Bench(store)
    if is_known:
        for device in ("a", "b"):
            store.keys.pin(device, public_key(key_of(device)), now_s=0.0)
    good = round_submission(number=2)
    wrong = msgspec.structs.replace(good, task=bytes(32))
    receipts = bench.handle(
        *_upload(good, "a"),
        *_upload(good, "a"),
        *_upload(wrong, "b"),
        (device_topic(FLEET, "a", "state"), presence_of("a")),
        ("pf/1/barn/d/a/nonsense", b"x"),
    )
    assert {(device, each.status, each.reason) for device, each in receipts} == {
        ("a", "received", None),
        ("b", "refused", "unknown_task"),
    }
    assert list(store.submissions.all(TASK.digest)) == ["a"]
    assert store.blobs.read(digest_of(encode(good))) == encode(good)
    assert [(each.device, each.state) for each in store.devices.all()] == [("a", "online")]
    assert [(each.device, each.reason, each.count) for each in store.refusals.all()] == [
        ("?", "malformed", 1),
        ("b", "unknown_task", 1),
    ]


def test_uploads_that_complete_in_one_batch_are_not_all_in_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction reads those beyond a limit, one after the other."""
    bench, devices = Bench(store), ["a", "b", "c", "d", "e"]
    for device in devices:
        store.keys.pin(device, public_key(key_of(device)), now_s=0.0)
    size_bytes = len(encode(round_submission(number=2)))
    monkeypatch.setattr(device_messages, "MAX_READ_BYTES", size_bytes)
    read = []

    class Spy(DeviceMessages):
        def store_items(self) -> None:
            read.append(self._read_bytes)
            super().store_items()

    bench.intake._messages.__class__ = Spy
    for sequence in (1, 2):
        batch = [each for device in devices for each in _upload(_numbered(device, sequence), device)]
        receipts = bench.handle(*batch)
        assert [(device, each.status) for device, each in receipts] == [
            (each, "received") for each in devices
        ]
    assert read == [2 * size_bytes] * 2
    assert [each.entry.sequence for each in store.submissions.all(TASK.digest).values()] == [2] * 5


def _numbered(device: str, sequence: int) -> Submission:
    return round_submission(number=2, sequence=sequence, seed=ord(device))


@pytest.mark.parametrize("is_known", [False, True])
def test_refused_evaluation_is_counted_each_time_in_a_batch(store: Store, *, is_known: bool) -> None:
    bench = Bench(store)
    if is_known:
        store.keys.pin("dev", public_key(key_of("dev")), now_s=0.0)
    wrong = _upload(evaluation(task=TASK.digest, head_version=9))
    assert [each.reason for _, each in bench.handle(*wrong, *wrong)] == ["unknown_head"] * 2
    assert [(each.reason, each.count) for each in store.refusals.all()] == [("unknown_head", 2)]


def test_refused_uploads_do_not_count_in_the_quota_of_an_hour(store: Store) -> None:
    task = msgspec.structs.replace(TASK, limits=Limits(uploads_per_hour=2))
    store.facts.put(task)
    bench = Bench(store, task)
    for sequence, reason in ((2, None), (1, "superseded"), (3, None), (4, "quota")):
        ((_, receipt),) = bench.handle(*_upload(round_submission(number=2, sequence=sequence)))
        assert receipt.reason == reason


def test_verdicts_follow_what_others_store(store: Store) -> None:
    """The device's submission that another receiver has stored, the newest head, and the task that is served."""
    one, other = Bench(store), Bench(store)
    ((_, receipt),) = one.handle(*_upload(round_submission(number=2, sequence=5)))
    assert receipt.status == "received"
    ((_, receipt),) = other.handle(*_upload(round_submission(number=2, sequence=4)))
    assert (receipt.reason, receipt.sequence) == ("superseded", 5)
    ((_, receipt),) = other.handle(*_upload(round_submission(number=0)))
    assert (receipt.reason, receipt.detail) == ("late", "the submission is for round 0, but round 2 is open")
    assert store.facts.get(RoundRequest) is None
    ((_, receipt),) = other.handle(*_upload(round_submission(number=3)))
    assert receipt.reason == "unknown_round"
    assert store.facts.get(RoundRequest) is not None
    with contextlib.closing(open_store(store.folder)) as coordinator:
        coordinator.facts.put(IntakeHeads(TASK.digest, 4, frozenset({4}), frozenset()))
    ((_, receipt),) = other.handle(*_upload(round_submission(number=3)))
    assert receipt.status == "received"  # the same upload
    ((_, receipt),) = other.handle(*_upload(round_submission(number=2, sequence=6)))
    assert receipt.reason == "late"
    reports = {version: evaluation(task=TASK.digest, head_version=version) for version in (3, 4)}
    for reported in reports.values():
        ((_, receipt),) = one.handle(*_upload(reported))
        assert receipt.status == "received"
    assert store.evaluations.of_head(TASK.digest, 4) == {"dev": reports[4]}
    assert store.evaluations.of_head(TASK.digest, 3) == {}  # nothing depends on it any more
    with contextlib.closing(open_store(store.folder)) as coordinator:
        with coordinator.transaction():
            coordinator.submissions.delete("dev")
        assert one.intake.view.refresh()
        assert one.intake.view.deleted == {"dev"}
        coordinator.facts.put(msgspec.structs.replace(TASK, digest=bytes(32)))
        with pytest.raises(TaskReplaced):
            one.handle()


def test_bytes_of_earlier_starts_are_counted(tmp_path: Path) -> None:
    """Stored every few seconds and at the end."""
    for start in range(1, 3):
        with contextlib.closing(open_store(tmp_path)) as store:
            meter = TrafficMeter(store)
            meter.keep(sent=0)
            meter.received = 100
            meter.keep(sent=10)
            assert (store.facts.get(Traffic) or Traffic()) == Traffic(100 * (start - 1), 10 * (start - 1))
            meter.keep(sent=10, at_once=True)
            assert store.facts.get(Traffic) == Traffic(100 * start, 10 * start)
