"""From submissions to a head, over restarts, failures, and a full disk."""

import contextlib
import dataclasses
import logging
import queue
import shutil
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from aggregator.commands.arguments import DeviceArguments
from aggregator.commands.command_socket import Done, Refused, Request
from aggregator.config.task_file import load_task
from aggregator.job_processes import JobRunner
from aggregator.server.aggregator import Aggregator
from aggregator.server.events import Event
from aggregator.status.collect import collect_status
from aggregator.storage.background import WriteBatch
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.tasks.retention import RETENTION_S
from aggregator.tasks.task_preparation import prepare_task
from aggregator.training.jobs import Result
from aggregator.training.trainer import Finished
from protocol.errors import StateError, ThreadFailed
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Outgoing, Received
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import Receipt, Submission
from protocol.wire.quantization import prototype_fields
from protocol.wire.topics import device_topic, fleet_topic
from protocol.wire.transfer import frames_of
from tests.support.fleets.aggregator_process import (
    FLEET,
    MAX_BYTES,
    PATIENT,
    run_aggregator,
    running_fleet,
    signed,
    write_task,
)
from tests.support.messages.heads import plan_head
from tests.support.messages.jobs import head_job
from tests.support.messages.submissions import submission
from tests.support.simulation.clocks import FakeClock


def _separable(task: bytes, *, sequence: int = 1, seed: int = 0) -> Submission:
    labels = (0, 1, 2) * 20
    values = np.random.default_rng(seed).normal(size=(60, 16)) * 0.1 + np.eye(16)[list(labels)] * 3
    random = submission(task=task, sequence=sequence, labels=labels)
    return replace(random, **prototype_fields(values.astype(np.float16)))


def test_failed_training_is_logged_and_shown(amqtt_broker: BrokerAddress, tmp_path: Path) -> None:
    """The same submission again does not repeat it."""
    task_file = write_task(tmp_path, 'quorum = 1\n[training]\nrecipe = "paper"\ndevice = "cuda:99"')
    with running_fleet(task_file, amqtt_broker, "a") as (daemon, [device]):
        task = digest_of(device.task())
        assert device.upload(_separable(task)).status == "received"
        daemon.until(lambda _: "head training failed version=1" in daemon.log())
        daemon.until(lambda summary: summary["failed_training"] is not None)
        assert device.upload(_separable(task)).status == "received"
        assert "Traceback" not in daemon.log()
        summary = daemon.status()
        assert summary["heads"] == []
        assert "PyTorch finds no CUDA device" in summary["failed_training"]["reason"]
        shown = run_aggregator("status", "--state", str(daemon.state)).stdout
        assert "training failed head 1, " in shown


class Bench:
    """An aggregator without a broker."""

    def __init__(
        self,
        folder: Path,
        settings: str = "",
        *,
        clock: FakeClock | None = None,
        events: queue.SimpleQueue[Event] | None = None,
    ) -> None:
        self.store = open_store(folder / "state")
        if clock is not None:
            self.store.clock = clock
        self.task = prepare_task(*load_task(write_task(folder, settings)), store=self.store)
        broker, events = BrokerAddress("127.0.0.1", 1), events or queue.SimpleQueue()
        jobs = JobRunner(events.put)
        self.daemon = Aggregator(self.task, self.store, broker=broker, events=events, jobs=jobs)
        self.sent: list[Outgoing] = []
        self.session = cast("Any", self.daemon._publisher._session)
        self.session.send = self.sent.append

    def submission(self, *, sequence: int = 1) -> Submission:
        return _separable(self.task.digest, sequence=sequence)

    def handle(self, *messages: Submission) -> list[str]:
        """Handle a batch of submissions; return the status of each receipt that is sent."""
        payloads = [encode(message) for message in messages]
        frames = [frame for each in payloads for frame in frames_of(each, digest=digest_of(each))]
        self.sent.clear()
        self.daemon.handle([Received(device_topic(FLEET, "dev", "up"), signed(each)) for each in frames])
        topic = device_topic(FLEET, "dev", "ack")
        receipts = [each.payload for each in self.sent if each.topic == topic]
        return [decode(receipt, Receipt, max_bytes=MAX_BYTES).status for receipt in receipts]


def test_submission_is_stored_before_it_is_answered_and_acknowledged(tmp_path: Path) -> None:
    """Another process then finds its row and its blob."""
    bench, found = Bench(tmp_path, "quorum = 9"), list[tuple[str, bool]]()
    message = bench.submission()

    def look(what: str) -> None:
        with closing(open_store(bench.store.folder, read_only=True)) as other:
            digest = digest_of(encode(message))
            found.append((what, other.holds("dev", digest) and bench.store.blobs.is_whole(digest)))

    bench.session.send = lambda _: look("receipt")
    bench.session.acknowledge = lambda _: look("acknowledgement")
    bench.handle(message)
    assert found == [("receipt", True), ("acknowledgement", True)]


def test_submission_that_could_not_be_stored_is_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program ends, and the device sends it again to the next one."""
    bench = Bench(tmp_path, "quorum = 9")

    def fail(*_: object) -> None:
        raise StateError("no space left")

    monkeypatch.setattr(WriteBatch, "finish", fail)
    with pytest.raises(StateError, match="no space left"):
        bench.handle(bench.submission())
    assert bench.sent == []
    assert bench.store.submissions.all(bench.task.digest) == {}


def test_head_that_cannot_be_stored_is_a_failed_training(tmp_path: Path) -> None:
    """The next submission starts another training."""
    bench = Bench(tmp_path, "quorum = 2")
    training = bench.daemon._training
    plan_head(bench.store, 1, task=bench.task.digest, members={"a": b"a"}, state="training", attempt=1)
    metrics = {"seconds": 1.0, "onnx_max_difference": 0.0}
    job = head_job(bench.store.blobs, attempt=1)
    assert not training._finish(job, Finished(Result(prototypes=1, metrics=metrics)))
    failed = training.plan
    assert failed is not None
    assert (failed.state, failed.failures) == ("planned", 1)
    assert bench.store.heads.all(bench.task.digest) == []


def test_submissions_to_batches_count_their_images_in_a_task_of_blocks(tmp_path: Path) -> None:
    """As those of devices that submit to the later task; one whose bytes are lost is requested again."""
    first = Bench(tmp_path, PATIENT + '\n[client]\nprototypes = "batches"')
    batches = submission(task=first.task.digest)
    first.handle(batches)
    store, earlier = first.store, first.task.digest
    assert store.submissions.all(earlier)["dev"].per_class == {0: 2, 1: 1, 2: 1}
    record = store.submissions.all(earlier)["dev"]
    lost = dataclasses.replace(record.entry, digest=bytes(32))
    store.submissions.put(earlier, dataclasses.replace(record, device="lost", entry=lost))
    store.close()
    later = Bench(tmp_path, f'{PATIENT}\ncontinues = "{earlier.hex()}"')
    status = collect_status(later.store)
    assert status.counted == "images"
    assert {device.device: device.prototypes for device in status.devices} == {"dev": 20}


def test_deadline_is_of_elapsed_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submission that arrives while the clock is a year ahead does not wait for a year."""
    bench = Bench(tmp_path, "quorum = 9\ndeadline_s = 100", clock=(clock := FakeClock(7.0)))
    store, task = bench.store, bench.task.digest
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 365 * 86400)
    bench.handle(bench.submission())
    assert [record.entry.received_s for record in store.submissions.all(task).values()] == [7.0]
    monkeypatch.setattr(time, "time", lambda: now_s)
    clock.elapsed_s = 106.0
    bench.handle()
    assert store.heads.planned(task) is None
    clock.elapsed_s = 107.0
    bench.handle()
    assert store.heads.planned(task) is not None
    bench.daemon._training.stop()
    store.close()


@pytest.mark.parametrize("damage", ["deleted", "replaced", "damaged"])
def test_database_that_is_lost_while_running_ends_the_program(tmp_path: Path, damage: str) -> None:
    """Nothing is acknowledged that the next start does not have; the error has what to do."""
    bench = Bench(tmp_path, PATIENT)
    store = bench.store
    file = store.folder / "aggregator.sqlite"
    assert bench.handle(bench.submission()) == ["received"]
    store.database.read("PRAGMA wal_checkpoint(TRUNCATE)")
    before = file.read_bytes()
    expected = "deleted or replaced"
    if damage == "damaged":
        bench.daemon._uploads._search.join()
        bench.daemon._uploads._search_s = 0.0
        file.write_bytes(before[: len(before) // 2].ljust(len(before), b"\xff"))
        expected = "restore it from a backup"
    else:
        file.rename(tmp_path / "away")
    if damage == "replaced":
        file.write_bytes(before)
    if damage == "damaged":
        with contextlib.suppress(StateError):  # it may notice the damage itself
            bench.handle()
        bench.daemon._uploads._search.join()
    with pytest.raises(StateError, match=expected):
        bench.handle(bench.submission(sequence=2))
    assert bench.sent == [] or damage == "damaged"
    store.close()


def test_a_search_for_damage_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file takes seconds; what is found ends the program."""
    bench, may_end = Bench(tmp_path, PATIENT), threading.Event()

    def examine() -> None:
        may_end.wait()
        raise StateError("damaged: restore it")

    monkeypatch.setattr(bench.store.database, "_examine", examine)
    for sequence in (1, 2):
        bench.daemon._uploads._search_s = 0.0
        assert bench.handle(bench.submission(sequence=sequence)) == ["received"]
    may_end.set()
    bench.daemon._uploads._search.join()
    with pytest.raises(StateError, match="damaged: restore it"):
        bench.handle(bench.submission(sequence=3))
    bench.store.close()


def test_folder_of_blobs_that_is_deleted_while_running_ends_the_program(tmp_path: Path) -> None:
    """The next start writes the backbone again, and requests submissions from their devices."""
    bench = Bench(tmp_path, PATIENT)
    store = bench.store
    message = bench.submission()
    assert bench.handle(message) == ["received"]
    shutil.rmtree(store.folder / "blobs")
    with pytest.raises(StateError, match="No such file"):
        bench.handle(bench.submission(sequence=2))
    store.close()
    bench = Bench(tmp_path, PATIENT)
    store = bench.store
    assert bench.handle() == ["missing"]
    assert [each.device for each in store.submissions.lost(bench.task.digest)] == ["dev"]
    assert all(map(store.blobs.is_whole, bench.task.blobs))
    assert bench.handle(message) == ["received"]
    assert store.submissions.lost(bench.task.digest) == []
    assert store.submissions.all(bench.task.digest).keys() == {"dev"}
    shutil.rmtree(store.folder)
    with pytest.raises(StateError):
        bench.handle()
    assert not store.folder.exists()
    store.close()


def test_end_of_a_thread_ends_the_program(tmp_path: Path) -> None:
    """With a message, also if another thread reported it before the aggregator was made."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    events.put(ThreadFailed("the thread embedded-broker has ended"))
    bench = Bench(tmp_path, events=events)
    with pytest.raises(ThreadFailed, match="embedded-broker"):
        bench.daemon.run()
    bench.store.close()


def test_manifests_are_published_again_before_they_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a day, without any event; a channel without a manifest stays empty."""
    bench, now_s = Bench(tmp_path), time.time()
    bench.daemon.handle([Connected(None)])
    first = [each for each in bench.sent if each.topic == fleet_topic(FLEET, "task")]
    for days in (0.9, 1.1, 1.2):
        later_s = now_s + days * 86400
        monkeypatch.setattr(time, "time", lambda later_s=later_s: later_s)
        bench.handle()
        again = [(each.topic, each.payload != first[0].payload) for each in bench.sent]
        assert again == ([(first[0].topic, True)] if days == 1.1 else [])
    bench.store.close()


@pytest.mark.parametrize("kind", ["replaced", "superseded", "over quota"])
def test_uploads_that_do_not_count_leave_a_bounded_size_of_blobs(tmp_path: Path, kind: str) -> None:
    """Large ones that a small one replaces or precedes in each batch, or any that are over a quota."""
    limits = "\n[limits]\nuploads_per_hour = 1" if kind == "over quota" else ""
    bench = Bench(tmp_path, PATIENT + limits, clock=(clock := FakeClock(1e6)))
    store, task = bench.store, bench.task.digest
    bench.handle(submission(task=task))
    labels = (0, 1, 2) * 1000
    large_bytes = len(encode(submission(labels=labels)))
    before, most = _blob_bytes(store), 0
    for number in range(10, 50, 2):
        clock.elapsed_s += RETENTION_S / 3
        large = submission(task=task, sequence=number, labels=labels, seed=number)
        small = submission(task=task, sequence=number + 1)
        receipts = bench.handle(*([small, large] if kind == "superseded" else [large, small]))
        assert ("received" in receipts) == (kind != "over quota")
        most = max(most, _blob_bytes(store) - before)
    assert most < 4 * large_bytes
    assert store.blobs.is_whole(store.submissions.all(task)["dev"].entry.digest)
    store.close()


def _blob_bytes(store: Store) -> int:
    return sum(map(store.blobs.size, store.blobs.digests()))


def _carried_out(bench: Bench, command: str, arguments: msgspec.Struct) -> Done | Refused:
    """Let the loop handle an operator's command; return the reply."""
    client, server = socket.socketpair()
    with client, server:
        request = Request(command, arguments, server, queue.SimpleQueue())
        bench.daemon.handle([request])
        return request.replies.get_nowait()


def test_forget_ends_the_training_before_it_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the unfinished upload; a restart knows of neither."""
    caplog.set_level(logging.INFO)
    bench = Bench(tmp_path, "quorum = 1")
    message = bench.submission()
    assert bench.handle(message) == ["received"]
    store, training = bench.store, bench.daemon._training
    uploads = bench.daemon._uploads._open._uploads
    assert [training.plan is None, training._trainer.job is None] == [False, False]
    payload = encode(bench.submission(sequence=2))
    (first, *_) = frames_of(payload, digest=digest_of(payload), ranges=((0, 100),))
    bench.daemon.handle([Received(device_topic(FLEET, "dev", "up"), signed(first))])
    assert [device for device, _ in uploads] == ["dev"]
    reply = _carried_out(bench, "forget", DeviceArguments("dev"))
    assert isinstance(reply, Done)
    assert reply.sentences[0] == "forgot dev: its submissions are deleted"
    assert [training.plan is None, training._trainer.job is None] == [True, True]
    assert "training ended: an operator's command has changed what it is made of" in caplog.text
    assert digest_of(encode(message)) not in store.blobs
    assert not uploads
    assert _carried_out(bench, "forget", DeviceArguments("dev")) == Refused(
        "ConfigError",
        "no submission of 'dev' is stored: `aggregator status` lists the devices that have submitted",
    )
    store.close()


def test_command_that_cannot_be_written_is_answered_and_ends_the_program(tmp_path: Path) -> None:
    """As any failed write."""
    bench = Bench(tmp_path, PATIENT)
    bench.store.keys.pin("dev", bytes(32), now_s=1.0)
    bench.store.database.write(
        "CREATE TEMP TRIGGER full BEFORE DELETE ON keys BEGIN SELECT RAISE(ABORT, 'full'); END"
    )
    client, server = socket.socketpair()
    with client, server:
        request = Request("reset-key", DeviceArguments("dev"), server, queue.SimpleQueue())
        with pytest.raises(StateError, match="full"):
            bench.daemon.handle([request])
        reply = request.replies.get_nowait()
    assert isinstance(reply, Refused)
    assert (reply.kind, "full" in reply.reason) == ("StateError", True)
    bench.store.close()
