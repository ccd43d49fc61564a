"""From submissions to a head, over restarts, failures, and a full disk."""

import queue
import resource
import shutil
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from msgspec.structs import replace

from aggregator.algorithms.algorithm import Training
from aggregator.config.task_file import load_task
from aggregator.coordination.round_state import Entry, State
from aggregator.heads import schedule
from aggregator.intake import intake_status
from aggregator.server.aggregator import Aggregator
from aggregator.server.device_messages import DeviceMessages
from aggregator.server.event_loop import Event
from aggregator.storage.background import WriteBatch
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.tasks.task_preparation import Task, prepare_task
from aggregator.training.jobs import HeadJob, Result
from aggregator.training.runner import Finished
from protocol.errors import StateError, ThreadFailed
from protocol.models.onnx_metadata import HeadMetadata, read_metadata
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Outgoing, Received
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import Receipt, Submission, TaskManifest
from protocol.wire.quantization import prototype_fields
from protocol.wire.topics import device_topic, fleet_topic
from protocol.wire.transfer import frames_of
from tests.support.fleets.aggregator_process import (
    FLEET,
    MAX_BYTES,
    PATIENT,
    Daemon,
    Device,
    aggregator,
    run_aggregator,
    running_fleet,
    signed,
    write_task,
)
from tests.support.graphs.backbones import tiny_backbone
from tests.support.messages.submissions import evaluation, submission
from tests.support.network.brokers import amqtt
from tests.support.simulation.clocks import FakeClock


def _separable(task: bytes, *, sequence: int = 1, seed: int = 0) -> Submission:
    labels = (0, 1, 2) * 20
    values = np.random.default_rng(seed).normal(size=(60, 16)) * 0.1 + np.eye(16)[list(labels)] * 3
    random = submission(task=task, sequence=sequence, labels=labels)
    return replace(random, **prototype_fields(values.astype(np.float16)))


def _accuracy(head: bytes) -> float:
    session = onnxruntime.InferenceSession(head, providers=["CPUExecutionProvider"])
    labels = np.array([0, 1, 2])
    (probabilities,) = session.run(
        ["probabilities"], {"feature": (np.eye(16)[labels] * 3).astype(np.float32)}
    )
    return float((probabilities.argmax(axis=1) == labels).mean())


def test_head_is_trained_and_survives_a_restart(amqtt_broker: BrokerAddress, tmp_path: Path) -> None:
    """Quorum, training, head, evaluation; after a restart all of it is there, and a late device counts.

    A submission that was damaged on the disk is requested from its device, and the head made without it meanwhile.
    """
    pytest.importorskip("torch")
    task_file = write_task(tmp_path, "quorum = 2\ndeadline_s = 1000\n[training]\nepochs = 5")
    with Device(amqtt_broker, "a") as a, Device(amqtt_broker, "b") as b:
        with aggregator(task_file, amqtt_broker) as daemon:
            a.aggregator_is("online")
            task = digest_of(a.task())
            assert a.upload(_separable(task)).status == "received"
            lost = b.send_payload(encode(_separable(task, seed=1)))
            assert b.receipt(lost).status == "received"
            manifest = a.head()
            assert (manifest.version, manifest.devices, manifest.prototypes) == (1, 2, 120)
            head = a.fetch(manifest.head)
            assert _accuracy(head) == 1.0
            assert head == (daemon.state / "head.onnx").read_bytes()
            assert (daemon.state / "model.onnx").is_file()
            properties = onnxruntime.InferenceSession(head).get_modelmeta().custom_metadata_map
            assert read_metadata(properties, HeadMetadata).classes == ("cat", "dog", "fox")
            assert a.upload(evaluation(task=task)).status == "received"
        assert daemon.process.returncode == 0
        stored = daemon.state / "blobs" / lost.hex()
        stored.write_bytes(stored.read_bytes().replace(b"prototypes", b"prototypez"))
        with aggregator(task_file, amqtt_broker) as daemon:
            with Device(amqtt_broker, "c") as c:
                assert c.head() == manifest
                c.aggregator_is("online")
                assert c.upload(_separable(task, seed=2)).status == "received"
                assert c.head(2).devices == 2
                assert b.receipt(lost).status == "missing"
                assert daemon.status()["lost_submissions"][0]["device"] == "b"
                assert b.upload(_separable(task, seed=1)).status == "received"
                assert c.head(3).devices == 3
            summary = daemon.status()
            assert [head["version"] for head in summary["heads"]] == [1, 2, 3]
            assert summary["lost_submissions"] == []
            held_out: dict[str, object] = {
                "correct": 9,
                "incorrect": 1,
                "accuracy": 0.9,
                "balanced": 0.9,
                "devices": 1,
                "with_prior": None,
                "confused": [],
            }
            assert summary["heads"][0]["held_out"] == held_out
            assert (summary["submissions"], summary["waiting"]) == (3, 0)


def test_features_of_several_backbones_are_concatenated(amqtt_broker: BrokerAddress, tmp_path: Path) -> None:
    """The head takes all of them, and model.onnx contains all of them."""
    task_file = write_task(tmp_path, "[training]\nepochs = 1")
    (tmp_path / "eight.onnx").write_bytes(tiny_backbone(feature_size=8))
    text = task_file.read_text().replace('["tiny.onnx"]', '["tiny.onnx", "eight.onnx"]')
    task_file.write_text(text)
    with running_fleet(task_file, amqtt_broker, "a") as (daemon, [device]):
        backbones = decode(device.task(), TaskManifest, max_bytes=MAX_BYTES).backbones
        assert [backbone.name for backbone in backbones] == ["tiny.onnx", "eight.onnx"]
        task = digest_of(device.task())
        assert device.upload(submission(task=task, feature_size=16)).reason == "shape"
        assert device.upload(submission(task=task, feature_size=24)).status == "received"
        session = onnxruntime.InferenceSession(device.fetch(device.head().head))
        metadata = read_metadata(session.get_modelmeta().custom_metadata_map, HeadMetadata)
        assert metadata.feature_size == 24
        assert metadata.backbones == tuple(backbone.digest.hex() for backbone in backbones)
        model = onnxruntime.InferenceSession(daemon.state / "model.onnx")
        assert [entry.name for entry in model.get_inputs()] == ["backbone_1/image", "backbone_2/image"]
        assert daemon.status()["model_path"] == str(daemon.state / "model.onnx")


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


def _limit_files(daemon: Daemon, size_bytes: int) -> None:
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def test_full_disk_stops_only_the_intake(amqtt_broker: BrokerAddress, tmp_path: Path) -> None:
    """Uploads are refused, blobs are sent, `status` shows the reason; with space again, intake resumes."""
    task_file = write_task(tmp_path, PATIENT)
    with running_fleet(task_file, amqtt_broker, "a", "b") as (daemon, [device, other]):
        task = digest_of(device.task())
        assert device.upload(submission(task=task)).status == "received"
        payload = encode(submission(task=task, sequence=2, labels=(0, 1, 2) * 5000))
        _limit_files(daemon, len(payload) // 2)
        receipt = device.receipt(device.send_payload(payload))
        assert (receipt.status, receipt.reason) == ("refused", "no_space")
        refused = other.upload(submission(task=task))
        assert (refused.status, refused.reason) == ("refused", "no_space")
        (backbone,) = decode(device.task(), TaskManifest, max_bytes=MAX_BYTES).backbones
        assert device.fetch(backbone) == tiny_backbone()
        shown = run_aggregator("status", "--state", str(daemon.state)).stdout
        assert "intake stopped since 2" in shown
        assert "cannot use" in shown
        assert daemon.status()["submissions"] == 1
        assert not daemon.status()["refusals"]
        _limit_files(daemon, resource.RLIM_INFINITY)
        daemon.until(lambda summary: summary["intake"]["stopped_s"] is None)
        assert device.receipt(device.send_payload(payload)).status == "received"
        assert device.upload(submission(task=task)).reason == "superseded"
        assert other.upload(submission(task=task)).status == "received"
        assert daemon.status()["submissions"] == 2
        assert daemon.log().count("intake stopped") == daemon.log().count("intake resumed") == 1
        assert "Traceback" not in daemon.log()


def test_address_in_use_ends_the_program(tmp_path: Path, address: BrokerAddress) -> None:
    """An embedded broker that cannot listen ends the program with 1 and one line."""
    task_file = write_task(tmp_path)
    with amqtt(address), aggregator(task_file, address, "--embedded-broker") as daemon:
        assert daemon.process.wait(timeout=300) == 1
        assert "error: the embedded broker cannot listen on" in daemon.log()
        assert "Traceback" not in daemon.log()


def test_unavailable_broker_is_retried(tmp_path: Path, address: BrokerAddress) -> None:
    with aggregator(write_task(tmp_path), address) as daemon:
        daemon.until(lambda _: "no broker at" in daemon.log())
        with amqtt(address), Device(address) as device:
            device.aggregator_is("online")


def _in_process(
    folder: Path,
    settings: str = "",
    *,
    clock: FakeClock | None = None,
    events: queue.SimpleQueue[Event] | None = None,
) -> tuple[Aggregator, Task, Store, list[Outgoing]]:
    """Return an aggregator without a broker, its task and store, and the list of what it sends from now on."""
    store, sent = open_store(folder / "state"), list[Outgoing]()
    if clock is not None:
        store.clock = clock
    task = prepare_task(*load_task(write_task(folder, settings)), store=store)
    daemon = Aggregator(task, store, broker=BrokerAddress("127.0.0.1", 1), events=events)
    daemon._publisher._session.send = sent.append  # type: ignore[method-assign, assignment]
    return daemon, task, store, sent


def _uploaded(message: Submission) -> list[Event]:
    payload = encode(message)
    frames = frames_of(payload, digest=digest_of(payload))
    return [Received(device_topic(FLEET, "dev", "up"), signed(frame)) for frame in frames]


def test_submission_is_stored_before_it_is_answered_and_acknowledged(tmp_path: Path) -> None:
    """Another process then finds its row and its blob."""
    daemon, task, store, _ = _in_process(tmp_path, "quorum = 9")
    message, found = _separable(task.digest), list[tuple[str, bool]]()

    def look(what: str) -> None:
        with closing(open_store(store.folder, read_only=True)) as other:
            digest = digest_of(encode(message))
            found.append((what, other.holds("dev", digest) and store.blobs.is_whole(digest)))

    daemon._publisher._session.send = lambda _: look("receipt")  # type: ignore[method-assign, assignment]
    daemon._publisher._session.acknowledge = lambda _: look("acknowledgement")  # type: ignore[method-assign, assignment]
    daemon._loop.handle(_uploaded(message))
    assert found == [("receipt", True), ("acknowledgement", True)]


def test_submission_that_could_not_be_stored_is_not_answered_as_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, and its device sends it again."""
    daemon, task, store, sent = _in_process(tmp_path, "quorum = 9")

    def fail(*_: object) -> None:
        raise StateError("no space left")

    monkeypatch.setattr(WriteBatch, "finish", fail)
    daemon._loop.handle(_uploaded(_separable(task.digest)))
    receipts = [
        decode(each.payload, Receipt, max_bytes=65536) for each in sent if each.topic.endswith("/ack")
    ]
    assert [(receipt.status, receipt.reason) for receipt in receipts] == [("refused", "no_space")]
    assert store.entries(task.digest) == {}


def test_head_that_cannot_be_stored_is_a_failed_training(tmp_path: Path) -> None:
    """The next submission starts another training."""
    daemon, task, store, _ = _in_process(tmp_path, "quorum = 2")
    entries = {"a": Entry(1, b"a", 0.0)}
    daemon._training.state = State(submissions=entries, training=entries)
    metrics = {"seconds": 1.0, "onnx_max_difference": 0.0}
    job = HeadJob(
        version=1,
        task="",
        members={},
        blobs="",
        feature_size=16,
        training=Training(),
        folder=str(tmp_path / "gone"),
    )
    daemon._training._job = job
    daemon.handle(Finished(job, Result(prototypes=1, metrics=metrics)))
    failed = daemon._training.state
    assert (failed.submissions, failed.failed, failed.failures) == (entries, entries, 1)
    assert store.heads.all(task.digest) == []


def test_deadline_is_of_elapsed_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submission that arrives while the clock is a year ahead does not wait for a year."""
    daemon, task, store, _ = _in_process(
        tmp_path, "quorum = 9\ndeadline_s = 100", clock=(clock := FakeClock(7.0))
    )
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 365 * 86400)
    daemon._loop.handle(_uploaded(_separable(task.digest)))
    assert [entry.received_s for entry in store.entries(task.digest).values()] == [7.0]
    monkeypatch.setattr(time, "time", lambda: now_s)
    clock.elapsed_s = 106.0
    daemon._loop.handle([])
    assert store.next_head(task.digest, 1).members == {}
    clock.elapsed_s = 107.0
    daemon._loop.handle([])
    assert store.next_head(task.digest, 1).members != {}
    daemon._training.stop()
    store.close()


def _receipts(sent: list[Outgoing]) -> list[str]:
    """Return the status of each receipt, and remove what was sent."""
    topic = device_topic(FLEET, "dev", "ack")
    found: list[str] = [
        decode(each.payload, Receipt, max_bytes=MAX_BYTES).status for each in sent if each.topic == topic
    ]
    sent.clear()
    return found


@pytest.mark.parametrize("damage", ["deleted", "replaced", "damaged"])
def test_database_that_is_lost_while_running_stops_the_intake(tmp_path: Path, damage: str) -> None:
    """Nothing is acknowledged that the next start does not have; `status` has the reason."""
    daemon, task, store, sent = _in_process(tmp_path, PATIENT)
    file = store.folder / "aggregator.sqlite"
    daemon._loop.handle(_uploaded(_separable(task.digest)))
    assert _receipts(sent) == ["received"]
    store.database.read("PRAGMA wal_checkpoint(TRUNCATE)")
    before = file.read_bytes()
    if damage == "damaged":
        daemon._uploads._check_s = 0.0
        file.write_bytes(before[: len(before) // 2].ljust(len(before), b"\xff"))
        daemon._loop.handle([])
    else:
        file.rename(tmp_path / "away")
    if damage == "replaced":
        file.write_bytes(before)
    again = _separable(task.digest), _separable(task.digest, sequence=2)
    daemon._loop.handle([event for each in again for event in _uploaded(each)])
    daemon._loop.handle([])
    assert "received" not in _receipts(sent)
    reason = intake_status.read(store.folder).reason
    assert ("deleted or replaced" in reason) == (damage != "damaged")
    assert "restore it from a backup" in reason
    if damage != "damaged":
        (tmp_path / "away").replace(file)
        daemon._uploads._trial_s = 0.0
        daemon._loop.handle([])
        daemon._loop.handle(_uploaded(again[1]))
        assert _receipts(sent) == ["received"]
    store.close()


def test_folder_of_blobs_that_is_deleted_while_running_stops_the_intake(tmp_path: Path) -> None:
    """The next start writes the backbone again, and requests submissions from their devices."""
    daemon, task, store, sent = _in_process(tmp_path, PATIENT)
    message = _separable(task.digest)
    daemon._loop.handle(_uploaded(message))
    assert _receipts(sent) == ["received"]
    shutil.rmtree(store.blobs.folder)
    daemon._loop.handle(_uploaded(_separable(task.digest, sequence=2)))
    daemon._uploads._trial_s = 0.0
    daemon._loop.handle([])
    assert "received" not in _receipts(sent)
    assert "restart the aggregator" in intake_status.read(store.folder).reason
    store.close()
    daemon, task, store, sent = _in_process(tmp_path, PATIENT)
    daemon._loop.handle([])
    assert _receipts(sent) == ["missing"]
    assert [each.device for each in store.submissions.lost(task.digest)] == ["dev"]
    assert all(map(store.blobs.is_whole, task.blobs))
    daemon._loop.handle(_uploaded(message))
    assert _receipts(sent) == ["received"]
    assert store.submissions.lost(task.digest) == []
    assert daemon._training.state.submissions.keys() == {"dev"}
    shutil.rmtree(store.folder)
    daemon._loop.handle([])
    assert not store.folder.exists()
    store.close()


def test_end_of_a_thread_ends_the_program(tmp_path: Path) -> None:
    """With a message, also if another thread reported it before the aggregator was made."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    events.put(ThreadFailed("the thread embedded-broker has ended"))
    daemon, _, store, _ = _in_process(tmp_path, events=events)
    with pytest.raises(ThreadFailed, match="embedded-broker"):
        daemon.run()
    store.close()


def test_manifests_are_published_again_before_they_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a day, without any event; a channel without a manifest stays empty."""
    (daemon, _, store, sent), now_s = _in_process(tmp_path), time.time()
    daemon._loop.handle([Connected(None)])
    first = [each for each in sent if each.topic == fleet_topic(FLEET, "task")]
    for days in (0.9, 1.1, 1.2):
        sent.clear()
        later_s = now_s + days * 86400
        monkeypatch.setattr(time, "time", lambda later_s=later_s: later_s)
        daemon._loop.handle([])
        again = [(each.topic, each.payload != first[0].payload) for each in sent]
        assert again == ([(first[0].topic, True)] if days == 1.1 else [])
    store.close()


@pytest.mark.parametrize("kind", ["replaced", "superseded", "over quota"])
def test_uploads_that_do_not_count_leave_a_bounded_size_of_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Large ones that a small one replaces or precedes in each batch, or any that are over a quota."""
    limits = "\n[limits]\nuploads_per_hour = 1" if kind == "over quota" else ""
    daemon, task, store, _ = _in_process(tmp_path, PATIENT + limits)
    daemon._loop.handle(_uploaded(submission(task=task.digest)))
    labels = (0, 1, 2) * 1000
    large_bytes = len(encode(submission(labels=labels)))
    before, most = _blob_bytes(store), 0
    monkeypatch.setattr(schedule, "MAX_UNUSED_BYTES", 3 * large_bytes)
    for number in range(10, 50, 2):
        large = submission(task=task.digest, sequence=number, labels=labels, seed=number)
        small = submission(task=task.digest, sequence=number + 1)
        batch = [small, large] if kind == "superseded" else [large, small]
        daemon._loop.handle([event for message in batch for event in _uploaded(message)])
        most = max(most, _blob_bytes(store) - before)
    assert most < 6 * large_bytes
    assert store.blobs.is_whole(store.entries(task.digest)["dev"].digest)
    store.close()


def _blob_bytes(store: Store) -> int:
    return sum(map(store.blobs.size, store.blobs.digests()))


def test_blob_that_another_program_deletes_before_the_transaction_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device sends its submission again while `aggregator forget` deletes the file."""
    daemon, task, store, sent = _in_process(tmp_path, PATIENT)
    events = _uploaded(message := _separable(task.digest))
    daemon._loop.handle(events)
    store.submissions.delete("dev", task.digest)
    store_items = DeviceMessages.store_items

    def delete_and_store(messages: DeviceMessages) -> None:
        store.blobs.delete([digest_of(encode(message))])
        store_items(messages)

    monkeypatch.setattr(DeviceMessages, "store_items", delete_and_store)
    sent.clear()
    daemon._loop.handle(events)
    assert _receipts(sent) == ["received"]
    assert store.blobs.is_whole(digest_of(encode(message)))
    store.close()
