"""Rounds with receivers, as processes that share a state folder with SQLite."""

import contextlib
import shutil
from pathlib import Path

import msgspec

from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import digest_of, encode
from protocol.wire.topics import SHARDS
from tests.support.fleets.aggregator_process import Device
from tests.support.fleets.receivers import Cluster
from tests.support.messages.submissions import round_submission
from tests.support.network.brokers import mosquitto, needs_mosquitto
from tests.unit.aggregator.server.test_rounds import SHAPES


@needs_mosquitto
def test_two_receivers_of_the_same_shards(prepared: Path, tmp_path: Path, address: BrokerAddress) -> None:
    """Each submission is stored and counts once, also on SQLite; rounds close, and an open one is published again."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    with (
        mosquitto(address, tmp_path),
        Cluster(tmp_path, address) as cluster,
        contextlib.ExitStack() as running,
    ):
        cluster.aggregator_state = tmp_path / "state"
        cluster.start_coordinator(tmp_path / "task.toml")
        for name in ("one", "two"):
            cluster.start_receiver(name, "--shards", f"0-{SHARDS - 1}")
            cluster.wait_for_log(name, f"shards={SHARDS}")
        a, b = (running.enter_context(Device(address, name)) for name in "ab")
        task = digest_of(a.task())
        made = {
            device: round_submission(task=task, shapes=SHAPES, seed=ord(device.name)) for device in (a, b)
        }
        refused = a.upload(msgspec.structs.replace(made[a], round=2))
        assert (refused.status, refused.reason) == ("refused", "unknown_round")
        assert a.round().number == b.round().number == 0
        assert a.round().number == 0  # published again
        for device in (a, b):
            assert device.upload(made[device]).status == "received"
        opened = a.round(1)
        assert digest_of(a.fetch(opened.tensors)) == opened.tensors.digest
        assert cluster.stored(task) == {device.name: digest_of(encode(made[device])) for device in (a, b)}
        assert a.head().devices == 2
        late = round_submission(task=task, number=1, sequence=2, shapes=SHAPES)
        assert b.upload(late).status == "received"
