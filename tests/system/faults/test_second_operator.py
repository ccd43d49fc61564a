"""SIGKILL of the aggregator and the second operator at each point of a list's life: it is opened and added once."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from aggregator.storage.open_store import open_store
from aggregator.sums.stored_lists import sums_of
from protocol.wire.codec import digest_of, encode
from protocol.wire.topics import fleet_topic
from protocol.wire.transfer import frames_of
from sums_operator.state import OperatorState, read_keys
from tests.support.fleets.fleet import Fleet
from tests.support.fleets.killed_program import run_until_killed, start_killed
from tests.support.fleets.secure_fleet import (
    make_operator,
    manifest_of,
    opened_total,
    own_sums,
    start_devices,
    start_operator,
    write_private_task,
)
from tests.support.network.brokers import free_address, mosquitto
from tests.system.attacks.attacker_client import TrafficMonitor

DEVICES, MIN_DEVICES = 4, 3
REQUESTS, REPLIES = fleet_topic("default", "sums/request"), fleet_topic("default", "sums/reply")

LIST = "aggregator.sums.second_operator:SecondOperatorLists._put"
AGGREGATOR = (
    (f"{LIST}:after", "listed"),
    ("aggregator.messaging.publisher:Publisher.request_sum:before", "listed"),
    ("aggregator.messaging.publisher:Publisher.request_sum:after", "listed"),
    ("aggregator.sums.second_operator:SecondOperatorLists.take:before", "listed"),
    (f"{LIST}:before", "listed"),  # the reply
    (f"{LIST}:after", "opened"),
    ("aggregator.heads.schedule:Schedule._begin:after", "opened"),
    ("aggregator.heads.schedule:store_head:before", "opened"),
    ("aggregator.heads.next_head:add_to_total:after", "opened"),  # in the transaction that stores the head
    ("aggregator.heads.schedule:store_head:after", "a head"),
)
"""Where the aggregator is killed, in this order, and what is stored afterwards."""
OPERATOR = (
    ("sums_operator.state:OperatorState.add:before", 0),
    ("sums_operator.state:OperatorState.add:after", 1),
    ("sums_operator.service:mqtt.Session.send:before", 1),
    ("sums_operator.service:mqtt.Session.send:after", 1),
)
"""Where the second operator is killed, in this order, and how many answered lists are stored afterwards."""
INIT = (
    "sums_operator.state:OperatorState:before",
    "sums_operator.state:OperatorState:after",
    "sums_operator.state:read_or_make_key:after",
    "sums_operator.state:write_atomically:before",
    "sums_operator.state:write_atomically:after",
)


def aggregator_arguments(fleet: Fleet) -> tuple[str | Path, ...]:
    state = ("--state", fleet.aggregator_state, "--broker", str(fleet.broker))
    return "aggregator.cli", "run", "--task", fleet.root / "task.toml", *state


def stored(fleet: Fleet) -> str:
    with closing(open_store(fleet.aggregator_state, read_only=True)) as store:
        pending = sums_of(store.facts, store.served_task().digest).pending
        if pending is None:
            return "a head" if store.heads.all(store.served_task().digest) else ""
        return "opened" if pending.masks else "listed"


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a fleet whose aggregator was killed before it stored its first list."""
    root = tmp_path_factory.mktemp("submitted")
    with mosquitto(address := free_address(), root), Fleet(root, address) as fleet:
        make_operator(root / "sums")
        write_private_task(root, min_devices=MIN_DEVICES, quorum=DEVICES)
        start_killed(fleet, "killed", f"{LIST}:before", *aggregator_arguments(fleet))
        start_devices(fleet, range(DEVICES))
        fleet.wait_exit("killed", -9)
        assert stored(fleet) == ""
        for number in range(DEVICES):
            fleet.kill(f"device-{number}")
    return root


@pytest.fixture
def fleet(submitted: Path, tmp_path: Path) -> Iterator[Fleet]:
    """Return a copy of that fleet with a broker of its own."""
    root = shutil.copytree(submitted, tmp_path / "fleet", ignore=shutil.ignore_patterns("*.log", "*.sock"))
    with mosquitto(address := free_address(), tmp_path), Fleet(root, address) as fleet:
        yield fleet


def check_opened_once(fleet: Fleet, monitor: TrafficMonitor) -> None:
    """Start an aggregator, and check that there is one head of all devices' sums, of one request and one reply."""
    fleet.start_aggregator(fleet.root / "task.toml")
    fleet.wait_for_log("aggregator", "connected to the broker")
    summary = fleet.wait_for("the head", lambda s: s["heads"])
    fleet.stop("aggregator")
    assert [head["devices"] for head in summary["heads"]] == [DEVICES]
    assert (summary["sums"]["lists"], summary["sums"]["devices"], summary["sums"]["requested"]) == (1, 4, 0)
    names = [f"device-{number}" for number in range(DEVICES)]
    with closing(open_store(fleet.aggregator_state)) as store:
        digest = manifest_of(store)[0]
        assert sorted(sums_of(store.facts, digest).devices) == names
        expected = sum(own_sums(fleet, name, digest).astype(np.int64) for name in names)
        np.testing.assert_array_equal(opened_total(store), expected)
    monitor.settle()
    assert (len({*monitor.payloads(REQUESTS)}), len({*monitor.payloads(REPLIES)})) == (1, 1)
    with closing(OperatorState(fleet.root / "sums", read_only=True)) as state:
        assert [each.devices for each in state.answered()] == [DEVICES]


def test_aggregator_is_killed_at_each_point(fleet: Fleet) -> None:
    start_operator(fleet, min_devices=MIN_DEVICES)
    fleet.wait_for_log("operator", " connected ")
    with TrafficMonitor(fleet.broker) as monitor:
        for point, expected in AGGREGATOR:
            run_until_killed(fleet, "killed", point, *aggregator_arguments(fleet))
            assert stored(fleet) == expected, point
        check_opened_once(fleet, monitor)


def test_second_operator_is_killed_at_each_point(fleet: Fleet) -> None:
    """Each time the same request is published again; other lists with its devices are refused from then on."""
    run_until_killed(fleet, "killed", AGGREGATOR[1][0], *aggregator_arguments(fleet))
    with closing(open_store(fleet.aggregator_state)) as store:
        pending = sums_of(store.facts, store.served_task().digest).pending
        assert pending is not None
        payload = store.blobs.read(bytes.fromhex(pending.request))
    (frame,) = frames_of(payload, digest=digest_of(payload))
    state = ("--state", fleet.root / "sums", "--broker", str(fleet.broker), "--fleet", "default")
    with TrafficMonitor(fleet.broker) as monitor:
        for number, (point, expected) in enumerate(OPERATOR, start=1):
            start_killed(fleet, "operator", point, "sums_operator.cli", "run", *state)
            fleet.wait_for_log("operator", " connected ", times=number)
            assert monitor.publish(REQUESTS, encode(frame))
            fleet.wait_exit("operator", -9)
            with closing(OperatorState(fleet.root / "sums", read_only=True)) as opened:
                assert len(opened.answered()) == expected, point
        start_operator(fleet, min_devices=MIN_DEVICES)
        fleet.wait_for_log("operator", " connected ", times=len(OPERATOR) + 1)
        assert monitor.publish(REQUESTS, encode(frame))
        fleet.wait_until("the reply", lambda: monitor.payloads(REPLIES))
        fleet.kill("operator")
        start_operator(fleet, min_devices=MIN_DEVICES)
        fleet.wait_for_log("operator", " connected ", times=len(OPERATOR) + 2)
        check_opened_once(fleet, monitor)


def test_init_is_killed_at_each_point(tmp_path: Path) -> None:
    """Keys that were written are never replaced, and without the card the program does not run."""
    folder, keys = tmp_path / "sums", dict[str, bytes]()
    with Fleet(tmp_path, free_address()) as fleet:
        for point in INIT:
            run_until_killed(fleet, "init", point, "sums_operator.cli", "init", folder)
            found = {file.name: file.read_bytes() for file in folder.glob("*.key")}
            assert keys.items() <= found.items(), point
            keys = found
            if "write_atomically:after" not in point:
                start_operator(fleet, min_devices=MIN_DEVICES)
                fleet.wait_exit("operator", 1)
        assert len(keys) == 1
        start_operator(fleet, min_devices=MIN_DEVICES)
        fleet.wait_for_log("operator", "second operator started")
        fleet.start("init", "sums_operator.cli", "init", folder)
        fleet.wait_exit("init", 1)
        assert "has a key already" in fleet.log("init")
    assert read_keys(folder).public()
