"""Simulated devices as tasks of a Ray cluster: the same heads as in this process."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import protofleet
from aggregator.algorithms.algorithm import Algorithm
from aggregator.algorithms.fedncm import FedNCM
from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.statistics.feature_map import Statistics
from aggregator.config.schema import Robust
from protocol.errors import ProtofleetError
from protofleet.simulation import algorithms
from protofleet.simulation.engine import LOCAL, Engine, RayEngine, running
from protofleet.simulation.fleet import Client
from protofleet.simulation.partitions import Partition
from protofleet.simulation.simulate import deal_out
from tests.support.ray_cluster import environment

CLASSES, DEVICES = 3, 5


@pytest.fixture(scope="module")
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the workers' temporary files."""
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def engine(temporary_files: Path) -> Iterator[Engine]:
    pytest.importorskip("ray")
    with environment(TMPDIR=str(temporary_files)), running("ray") as ray:
        yield ray


@pytest.fixture(scope="module")
def clients() -> list[Client]:
    random, labels = np.random.default_rng(0), np.arange(120) % CLASSES
    features = np.maximum(0, random.normal(size=(120, 6)) + 2 * np.eye(6)[labels]).astype(np.float32)
    data = protofleet.Dataset(features=features, labels=labels, classes=("a", "b", "c"))
    return deal_out(data, Partition("dirichlet", 1.0), devices=DEVICES, held_out=0.2, seed=0)


@pytest.mark.parametrize(
    "method",
    [FedNCM(), Statistics(features=0), FedProto(rounds=2, projection_size=4)],
    ids=lambda each: each.name,
)
def test_heads_and_uploads_are_the_same(
    method: Algorithm, clients: list[Client], engine: Engine, temporary_files: Path
) -> None:
    """The processor time of the workers is that of the algorithm; they write no files, since Ray kills them."""
    before_s = engine.remote_s
    made = [
        algorithms.train(method, clients, classes=CLASSES, robust=Robust(), engine=each)
        for each in (LOCAL, engine)
    ]
    assert (made[0].up_bytes, made[0].down_bytes) == (made[1].up_bytes, made[1].down_bytes)
    for local, remote in zip(made[0].logits, made[1].logits, strict=True):
        np.testing.assert_array_equal(local, remote)
    assert engine.remote_s > before_s
    assert not [path for path in temporary_files.iterdir() if not path.name.startswith("torch")]


def test_devices_alone_are_the_same(clients: list[Client], engine: Engine) -> None:
    local, remote = (
        algorithms.train_alone(clients, classes=CLASSES, engine=each) for each in (LOCAL, engine)
    )
    np.testing.assert_array_equal(local.logits, remote.logits)


def _number(shared: int, item: int) -> int:
    if item == shared:
        raise ProtofleetError("no such device")
    return item


def test_results_are_in_order_and_devices_are_drawn_as_they_are_needed(engine: Engine) -> None:
    """Only the shares that wait are in memory."""
    drawn: list[int] = []
    items = (drawn.append(number) or number for number in range(1000))  # type: ignore[func-returns-value]
    made = engine.map(_number, -1, items, count=1000)
    assert next(made) == 0
    assert len(drawn) < 1000
    assert list(made) == list(range(1, 1000))


def test_an_error_of_a_device_is_that_of_the_simulation(engine: Engine) -> None:
    assert isinstance(engine, RayEngine)
    with pytest.raises(ProtofleetError, match=r"^no such device$"), running("ray") as run:
        list(run.map(_number, 3, range(9), count=9))
