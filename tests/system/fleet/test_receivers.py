"""Receivers beside a coordinator, as real processes on PostgreSQL that are killed."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from aggregator.storage.receivers import ReceiverRecord
from aggregator.storage.store import Store
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import Submission
from protocol.wire.topics import SHARDS, shard_of
from protocol.wire.transfer import frames_of
from tests.support.databases.postgresql import PostgreSQL, needs_postgresql
from tests.support.fleets.aggregator_process import PATIENT, Device, aggregator, signed, write_task
from tests.support.fleets.fleet import Fleet
from tests.support.messages.submissions import submission
from tests.support.network.brokers import mosquitto, mosquitto_program

pytestmark = [
    needs_postgresql,
    pytest.mark.skipif(
        mosquitto_program() is None, reason="mosquitto is not installed: apt-get install mosquitto"
    ),
]

NAMES = ("a", "b", "c", "d")
WITHOUT_LARGE_PACKAGES = """
import sys
for name in ("torch", "onnx", "onnxruntime", "onnxscript", "scipy", "sklearn", "rpds"):
    sys.modules[name] = None
"""


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgreSQL]:
    """A running server."""
    server = PostgreSQL()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def database(postgresql: PostgreSQL, request: pytest.FixtureRequest) -> str:
    """The URL of a new database."""
    with psycopg.connect(postgresql.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {request.node.name}")
    return postgresql.url.replace("/postgres", f"/{request.node.name}")


class Cluster(Fleet):
    """A coordinator and receivers that share a state folder and a database of PostgreSQL."""

    def start_coordinator(self, task: Path, database: str) -> None:
        self.start(
            *("aggregator", self.aggregator_program, "coordinate", "--task", task, "--store", database),
            *("--state", self.aggregator_state, "--broker", str(self.broker)),
        )
        self.wait_for_log("aggregator", "connected to the broker")

    def start_receiver(self, name: str) -> None:
        """Start a receiver, on a machine that lacks the large packages."""
        (packages := self.root / "packages").mkdir(exist_ok=True)
        (packages / "sitecustomize.py").write_text(WITHOUT_LARGE_PACKAGES)
        self.start(
            *(name, "aggregator.cli.__main__", "receive", "--name", name, "--broker", str(self.broker)),
            *("--state", self.aggregator_state),
            environment={"PYTHONPATH": f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )

    def check(self) -> None:
        for name, process in self.processes.items():
            assert process.poll() in (None, -9, 137), f"{name} has ended\n{self.diagnostics()}"

    def receivers(self) -> dict[str, ReceiverRecord]:
        with contextlib.closing(Store(self.aggregator_state, read_only=True)) as store:
            return {name: record for name, (_, record) in store.receivers.all().items()}

    def wait_until_divided(self, *names: str) -> None:
        """Wait until these receivers have all shards, each one only once, and are connected."""

        def is_divided() -> bool:
            found = self.receivers()
            shards = [shard for name in found.keys() & names for shard in found[name].shards]
            if not found.keys() >= set(names):
                return False
            return sorted(shards) == list(range(SHARDS)) and all(
                self.log(name).rstrip().rpartition("shards=")[2] == str(len(found[name].shards))
                for name in names
            )

        self.wait_until(f"the shards divided among {names}", is_divided, pause_s=0.2)

    def stored(self, task: bytes) -> dict[str, bytes]:
        """Return the digest of each device's stored submission."""
        with contextlib.closing(Store(self.aggregator_state, read_only=True)) as store:
            return {device: entry.digest for device, entry in store.entries(task).items()}


@contextlib.contextmanager
def _cluster(task: Path, broker: BrokerAddress, database: str) -> Iterator[Cluster]:
    with mosquitto(broker, task.parent), Cluster(task.parent, broker) as cluster:
        cluster.start_coordinator(task, database)
        cluster.start_receiver("one")
        cluster.start_receiver("two")
        cluster.wait_until_divided("one", "two")
        yield cluster


def _submissions(task: bytes) -> dict[str, Submission]:
    return {name: submission(task=task, seed=number) for number, name in enumerate(NAMES)}


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


def test_uploads_without_a_coordinator(tmp_path: Path, address: BrokerAddress, database: str) -> None:
    """While it is dead uploads are accepted and acknowledged; the next one trains on them."""
    task_file = write_task(tmp_path, 'quorum = 4\n[training]\ndevice = "cpu"\nepochs = 2')
    with _cluster(task_file, address, database) as cluster, contextlib.ExitStack() as running:
        devices = [running.enter_context(Device(address, device)) for device in NAMES]
        sent = _submissions(digest_of(devices[0].task()))
        cluster.kill("aggregator")
        for device in devices:
            assert device.upload(sent[device.name]).status == "received"
        cluster.start_coordinator(task_file, database)
        assert devices[0].head().devices == len(NAMES)
