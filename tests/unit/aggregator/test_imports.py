"""Modules that the programs beside `serve` load: they run beside it, and none of them computes."""

import contextlib
from pathlib import Path

import pytest

from aggregator.coordination.rollout_state import State, Trial
from tests.support.imports import loaded_modules
from tests.support.messages.heads import evaluate
from tests.support.messages.submissions import TASK
from tests.unit.aggregator.status.stores import add_head, busy_store

COMPUTING = {"numpy", "scipy", "onnx", "onnxruntime", "torch", "PIL", "cryptography"}

SUPERVISOR = """
from aggregator.cli import programs
from aggregator.http import process, settings
from aggregator.messaging import broker_program
from aggregator.server import program
from aggregator import supervisor
"""

HTTP = """
from pathlib import Path

from aggregator.http import __main__, commands, server, snapshots
from aggregator.http.metrics import metrics_text

snapshot = snapshots.read_snapshot(Path("state"))
assert snapshot.status.rollout.candidate.summary.startswith("accuracy"), snapshot.problem
metrics_text(snapshot)
"""

STATUS = """
from aggregator.cli import cli

cli.main(["status", "--state", "state"], standalone_mode=False)
"""

BROKER = """
from aggregator.messaging import broker_program, embedded_broker
from protocol.mqtt.tls import BrokerAddress

broker = embedded_broker.EmbeddedBroker(BrokerAddress("127.0.0.1", 0), on_failure=print)
broker.start()
broker.stop()
"""


@pytest.mark.parametrize(
    ("program", "others"),
    [
        (SUPERVISOR, {"asyncio", "sqlite3"}),
        (HTTP, {"amqtt", "paho", "rich"}),
        (STATUS, {"amqtt", "paho", "uvicorn"}),
        (BROKER, {"paho", "sqlite3", "starlette"}),
    ],
    ids=["supervisor", "http", "status", "broker"],
)
def test_a_program_beside_serve_loads_no_library_that_computes(
    program: str, others: set[str], tmp_path: Path
) -> None:
    """Of a fleet with devices and a candidate, whose results are compared."""
    with contextlib.closing(busy_store(tmp_path / "state")) as store:
        add_head(store, 2)
        store.heads.put_rollout(TASK, State(newest=2, current=1, trial=Trial(2, 70.0, ("a", "b"), 2**32)))
        for device in "ab":
            evaluate(store, device, 2, correct=9, previous=8)
    loaded = loaded_modules(program, tmp_path)
    assert "aggregator" in loaded
    assert not (COMPUTING | others) & loaded
