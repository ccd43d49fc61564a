"""Fixtures of the aggregator's tests: a prepared task of rounds, servers, and an amqtt broker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.config.task_file import load_task
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.tasks.task_preparation import prepare_task
from protocol.mqtt.tls import BrokerAddress
from tests.support.fleets.aggregator_process import IN_ROUNDS, write_task
from tests.support.graphs.exported_graphs import provide
from tests.support.network.brokers import amqtt
from tests.support.stores.object_store import ObjectStore, moto_server, object_store


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task file of rounds and a state directory with its graphs; only to be copied."""
    folder = tmp_path_factory.mktemp("prepared")
    provide(task_file := write_task(folder, IN_ROUNDS), folder / "state")
    store = open_store(folder / "state")
    prepare_task(*load_task(task_file), store=store)
    store.close()
    return folder


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerAddress]:
    """A running S3 server."""
    with moto_server(tmp_path_factory.mktemp("moto")) as address:
        yield address


@pytest.fixture
def remote(s3_server: BrokerAddress, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A proxy before that server, which the AWS_* variables name."""
    with object_store(s3_server, monkeypatch) as proxy:
        yield proxy


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A new state directory."""
    return open_store(tmp_path)


@pytest.fixture
def amqtt_broker(address: BrokerAddress) -> Iterator[BrokerAddress]:
    """One kind of broker, for tests that do not depend on the broker."""
    with amqtt(address):
        yield address
