"""Workers beside an aggregator, as real processes that are killed."""

import contextlib
import queue
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from aggregator.config.task_file import load_task
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.training.jobs import HeadJob
from aggregator.training.runner import Finished, Progress, Trainer
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import digest_of
from tests.support.databases.postgresql import PostgreSQL, needs_postgresql
from tests.support.fleets.aggregator_process import (
    FLEET,
    TIMEOUT_S,
    Device,
    write_task,
)
from tests.support.fleets.fleet import Fleet, hanging
from tests.support.messages.submissions import FEATURE_SIZE, submission
from tests.support.network.brokers import mosquitto, needs_mosquitto
from tests.support.stores.object_store import BUCKET, moto_server, object_store

pytestmark = needs_mosquitto


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgreSQL]:
    """A running server."""
    with PostgreSQL() as server:
        yield server


@pytest.fixture
def database(postgresql: PostgreSQL, request: pytest.FixtureRequest) -> str:
    """The URL of a new database."""
    with psycopg.connect(postgresql.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {request.node.name}")
    return postgresql.url.replace("/postgres", f"/{request.node.name}")


TRAINING = "aggregator.training.head_job"


@needs_mosquitto
def test_killed_worker_and_killed_aggregator(tmp_path: Path, address: BrokerAddress) -> None:
    """The training goes on in another worker, counts once and as no failure, and makes the head of a local one."""
    task_file = write_task(tmp_path, 'quorum = 1\n[training]\ndevice = "cpu"\nepochs = 2')
    train = ("aggregator.cli", "train", "--lease-s", "4", "--state", tmp_path / "aggregator", "--name")
    with mosquitto(address, tmp_path), Fleet(tmp_path, address) as fleet, Device(address, "a") as device:
        fleet.start_aggregator(task_file, "--external-training")
        device.aggregator_is("online")
        task = digest_of(device.task())
        fleet.start("first", *train, "first", environment=hanging(tmp_path, TRAINING))
        fleet.wait_for_log("first", "worker ready")
        assert device.upload(submission(task=task)).status == "received"
        fleet.wait_for_log("first", "job claimed job=1 kind=head attempt=1")
        fleet.kill("aggregator")
        fleet.start_aggregator(task_file, "--external-training")
        fleet.wait_for_log("aggregator", "interrupted training resumed")
        fleet.start("second", *train, "second")
        fleet.wait_for_log("second", "worker ready")
        fleet.kill("first")
        fleet.wait_for_log("second", "job claimed job=1 kind=head attempt=2")
        fleet.wait_for_log("second", "job finished")
        assert device.head().version == 1
        status = fleet.status()
        assert ([head["version"] for head in status["heads"]], status["failed_training"]) == ([1], None)
        fleet.stop("second")
        fleet.stop("aggregator")
    with contextlib.closing(open_store(tmp_path / "aggregator")) as store:
        assert store.database.read("SELECT count(*) FROM jobs") == [(0,)]
        assert_local_training_makes_the_same(store, task_file, task)


@needs_postgresql
@needs_mosquitto
def test_workers_on_other_machines(
    tmp_path: Path, address: BrokerAddress, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With state folders of their own: the database and the object store are all that they share."""
    task_file = write_task(tmp_path, 'quorum = 2\n[training]\ndevice = "cpu"\nepochs = 2')
    with (
        moto_server(tmp_path) as objects,
        object_store(objects, monkeypatch),
        mosquitto(address, tmp_path),
        Fleet(tmp_path, address) as fleet,
        Device(address, "a") as a,
        Device(address, "b") as b,
    ):
        store_options = ("--store", database)
        fleet.start_aggregator(
            task_file, "--external-training", *store_options, "--blobs", f"s3://{BUCKET}/herd"
        )
        a.aggregator_is("online")
        task = digest_of(a.task())
        train = ("aggregator.cli", "train", "--lease-s", "4", *store_options, "--fleet", FLEET, "--state")
        fleet.start("first", *train, tmp_path / "first", environment=hanging(tmp_path, TRAINING))
        fleet.wait_for_log("first", "worker ready")
        for device in (a, b):
            assert device.upload(submission(task=task)).status == "received"
        fleet.wait_for_log("first", "job claimed job=1 kind=head attempt=1")
        fleet.start("second", *train, tmp_path / "second")
        fleet.wait_for_log("second", "worker ready")
        fleet.kill("first")
        fleet.wait_for_log("second", "job finished job=1 kind=head attempt=2")
        assert a.head().version == 1
        fleet.stop("second")
        fleet.start(
            "third", "aggregator.cli", "train", "--state", tmp_path / "second"
        )  # it remembers the database
        fleet.wait_for_log("third", "worker ready")
        fleet.stop("third")
        fleet.stop("aggregator")
        with contextlib.closing(open_store(tmp_path / "aggregator")) as store:
            assert_local_training_makes_the_same(store, task_file, task)


def assert_local_training_makes_the_same(store: Store, task_file: Path, task: bytes) -> None:
    (head,) = store.heads.all(task)
    events: queue.SimpleQueue[Progress | Finished] = queue.SimpleQueue()
    folder = store.folder / "local"
    job = HeadJob(
        version=1,
        task=task.hex(),
        members=dict(head.members),
        blobs=store.blobs.location,
        feature_size=FEATURE_SIZE,
        training=load_task(task_file)[0].training,
        folder=str(folder / "head-1"),
        has_novelty=True,
    )
    Trainer(folder, timeout_s=TIMEOUT_S, on_event=events.put).start(job)
    while not isinstance(event := events.get(timeout=TIMEOUT_S), Finished):
        pass
    assert event.result is not None
    assert (folder / "head-1" / "head.onnx").read_bytes() == store.blobs.read(head.file)
