"""Receivers and workers beside a coordinator, as real processes that are killed."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from aggregator.storage.open_store import open_store
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import Submission
from protocol.wire.topics import shard_of
from protocol.wire.transfer import frames_of
from tests.support.databases.postgresql import PostgreSQL, needs_postgresql
from tests.support.fleets.aggregator_process import (
    FLEET,
    PATIENT,
    Cluster,
    Device,
    aggregator,
    signed,
    write_task,
)
from tests.support.messages.submissions import submission
from tests.support.network.brokers import free_address, mosquitto, needs_mosquitto
from tests.support.network.proxy import Proxy
from tests.support.stores.object_store import BUCKET, moto_server, object_store

pytestmark = needs_mosquitto

NAMES = ("a", "b", "c", "d")


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


@contextlib.contextmanager
def _cluster(task: Path, broker: BrokerAddress, database: str) -> Iterator[Cluster]:
    with mosquitto(broker, task.parent), Cluster(task.parent, broker) as cluster:
        cluster.start_coordinator(task, "--store", database)
        cluster.start_receiver("one")
        cluster.start_receiver("two")
        cluster.wait_until_divided("one", "two")
        yield cluster


def _submissions(task: bytes) -> dict[str, Submission]:
    return {name: submission(task=task, seed=number) for number, name in enumerate(NAMES)}


@needs_postgresql
def test_head_is_that_of_one_process(tmp_path: Path, address: BrokerAddress, database: str) -> None:
    """Two receivers, with devices on both, and a coordinator make the same head as `aggregator run`."""
    settings = 'quorum = 4\n[training]\ndevice = "cpu"\nepochs = 2'
    heads = []
    for name in ("cluster", "alone"):
        (folder := tmp_path / name).mkdir()
        task_file = write_task(folder, settings)
        with contextlib.ExitStack() as running:
            if name == "cluster":
                cluster = running.enter_context(_cluster(task_file, address, database))
                shards = cluster.receivers()["one"].shards
                assert len({shard_of(device) in shards for device in NAMES}) == 2
            else:
                running.enter_context(mosquitto(address, folder))
                running.enter_context(aggregator(task_file, address))
            devices = [running.enter_context(Device(address, device)) for device in NAMES]
            devices[0].aggregator_is("online")
            sent = _submissions(digest_of(devices[0].task()))
            for device in devices:
                assert device.upload(sent[device.name]).status == "received"
            heads.append([device.fetch(device.head().head) for device in devices])
    assert len({head for each in heads for head in each}) == 1


@needs_postgresql
def test_killed_receiver(tmp_path: Path, address: BrokerAddress, database: str) -> None:
    """Its shards move during an upload: what it has acknowledged is kept, and everything counts once."""
    with _cluster(write_task(tmp_path, PATIENT), address, database) as cluster:
        of_one = [name for name in map(str, range(40)) if shard_of(name) in cluster.receivers()["one"].shards]
        with Device(address, of_one[0]) as early, Device(address, of_one[1]) as late:
            sent = submission(task=digest_of(early.task()))
            assert early.upload(sent).status == "received"
            payload = encode(submission(task=sent.task, labels=(0, 1, 2) * 3000))
            first, *rest = frames_of(payload, digest=digest_of(payload))
            assert rest
            late.send("up", signed(first, late.name))
            cluster.kill("one")
            cluster.wait_until_divided("two")
            for frame in rest:
                late.send("up", signed(frame, late.name))
            asked = late.receipt(digest_of(payload))
            assert (asked.status, asked.missing) == ("missing", ((0, len(first.data)),))
            late.send("up", signed(first, late.name))
            assert late.receipt(digest_of(payload)).status == "received"
            assert early.upload(sent).status == "received"
            assert cluster.stored(sent.task) == {
                early.name: digest_of(encode(sent)),
                late.name: digest_of(payload),
            }
            cluster.start_receiver("one")
            cluster.wait_until_divided("one", "two")


@needs_postgresql
def test_receiver_that_reaches_no_broker(tmp_path: Path, address: BrokerAddress, database: str) -> None:
    """The others take its shards, although it reaches the database, and give them back."""
    proxy = free_address()
    with _cluster(write_task(tmp_path, PATIENT), address, database) as cluster:
        with Proxy(proxy, address, seed=0):
            cluster.start_receiver("cut", "--broker", str(proxy))
            cluster.wait_until_divided("one", "two", "cut")
        cluster.wait_until_divided("one", "two")
        with Proxy(proxy, address, seed=0):
            cluster.wait_until_divided("one", "two", "cut")


@needs_postgresql
def test_uploads_without_a_coordinator(tmp_path: Path, address: BrokerAddress, database: str) -> None:
    """While it is dead uploads are accepted and acknowledged; the next one trains on them."""
    task_file = write_task(tmp_path, 'quorum = 4\n[training]\ndevice = "cpu"\nepochs = 2')
    with _cluster(task_file, address, database) as cluster, contextlib.ExitStack() as running:
        devices = [running.enter_context(Device(address, device)) for device in NAMES]
        sent = _submissions(digest_of(devices[0].task()))
        cluster.kill("aggregator")
        for device in devices:
            assert device.upload(sent[device.name]).status == "received"
        cluster.start_coordinator(task_file, "--store", database)
        assert devices[0].head().devices == len(NAMES)


@needs_postgresql
def test_receiver_with_a_state_folder_of_its_own(
    tmp_path: Path, address: BrokerAddress, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another machine: the database has the task and the object store, its folder the unfinished uploads."""
    with (
        moto_server(tmp_path) as objects,
        object_store(objects, monkeypatch),
        mosquitto(address, tmp_path),
        Cluster(tmp_path, address) as cluster,
        Device(address, "a") as device,
    ):
        cluster.start_coordinator(
            write_task(tmp_path, PATIENT), "--store", database, "--blobs", f"s3://{BUCKET}/barn"
        )
        own = {"state": tmp_path / "far"}
        cluster.start_receiver("far", "--store", database, "--fleet", FLEET, **own)
        cluster.wait_until_divided("far")
        payload = encode(submission(task=digest_of(device.task()), labels=(0, 1, 2) * 3000))
        *first, last = frames_of(payload, digest=digest_of(payload))
        device.send("up", signed(last, device.name))
        assert device.receipt(digest_of(payload)).missing == ((0, last.offset),)
        cluster.kill("far")
        cluster.start_receiver("far", **own)
        cluster.wait_for_log("far", "connected to the broker", times=2)
        for frame in first:
            device.send("up", signed(frame, device.name))
        assert device.receipt(digest_of(payload)).status == "received"
        with contextlib.closing(open_store(cluster.aggregator_state)) as store:
            assert store.blobs.read(digest_of(payload)) == payload
        assert not (tmp_path / "far" / "blobs").exists()


def test_another_task_is_served(tmp_path: Path, address: BrokerAddress) -> None:
    """A receiver follows the coordinator, and refuses submissions to the task before."""
    with (
        mosquitto(address, tmp_path),
        Cluster(tmp_path, address) as cluster,
        Device(address, "a") as device,
    ):
        cluster.start_coordinator(write_task(tmp_path, PATIENT))
        cluster.start_receiver("one")
        cluster.wait_until_divided("one")
        task = device.task()
        before = submission(task=digest_of(task))
        assert device.upload(before).status == "received"
        cluster.stop("aggregator")
        cluster.start_coordinator(write_task(tmp_path, f"{PATIENT}\n[client]\nalpha = 0.5"))
        cluster.wait_for_log("one", "connected to the broker", times=2)
        with Device(address, "b") as late:
            after = submission(task=digest_of(late.task(before=task)))
            assert late.upload(after).status == "received"
            assert device.upload(submission(task=before.task, seed=1)).reason == "unknown_task"
