"""A fleet with a second operator on real processes: nobody sees a device's sums, and the head is that of all."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from aggregator.http.commands import run_command
from aggregator.storage.open_store import open_store
from aggregator.sums.stored_lists import sums_of
from protocol.errors import ConfigError
from protocol.storage.keyfile import read_key
from protocol.wire.signing import public_key
from tests.support.fleets.fleet import Fleet
from tests.support.fleets.secure_fleet import (
    consent,
    make_operator,
    manifest_of,
    opened_total,
    own_sums,
    start_devices,
    start_operator,
    write_private_task,
)
from tests.support.network.brokers import free_address, mosquitto

DEVICES, MIN_DEVICES = 12, 8


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with mosquitto(address := free_address(), tmp_path), Fleet(tmp_path, address) as fleet:
        yield fleet


def prepared(fleet: Fleet) -> Path:
    """Make the second operator's keys, the public map and the task file."""
    make_operator(fleet.root / "sums")
    return write_private_task(fleet.root, min_devices=MIN_DEVICES)


def test_opened_sum_is_exactly_that_of_the_listed_devices(fleet: Fleet, tmp_path: Path) -> None:
    """A third of the devices is killed, each in another phase, and both operators are: nothing is asked twice."""
    task = prepared(fleet)
    fleet.start_aggregator(task)
    start_devices(fleet, range(DEVICES))
    fleet.kill("device-0")
    for name, phase in (("device-1", "computing features"), ("device-2", "submission built")):
        fleet.wait_for_log(name, phase)
        fleet.kill(name)
    fleet.wait_for_log("device-3", "submission received")
    fleet.kill("device-3")
    fleet.wait_for_log("aggregator", "sum requested from the second operator")
    fleet.kill("aggregator")  # the list is stored, and is not opened yet
    start_operator(fleet, min_devices=MIN_DEVICES)
    fleet.wait_for_log("operator", " connected ")
    fleet.kill("operator")
    start_operator(fleet, min_devices=MIN_DEVICES)
    fleet.wait_for_log("operator", " connected ", times=2)  # else it waits a minute for the next request
    fleet.start_aggregator(task)
    summary = fleet.wait_for("the head", lambda s: s["heads"])
    assert summary["heads"][0]["metrics"]["onnx_max_difference"] <= 1e-4
    assert summary["refusals"] == []
    for number in range(4, DEVICES):
        fleet.wait_exit(f"device-{number}")
    with closing(open_store(fleet.aggregator_state)) as store:
        digest = manifest_of(store)[0]
        lists = sums_of(store.facts, digest)
        assert (lists.count, lists.pending) == (1, None)
        assert len(lists.devices) >= MIN_DEVICES
        expected = sum(own_sums(fleet, name, digest).astype(np.int64) for name in lists.devices)
        np.testing.assert_array_equal(opened_total(store), expected)
        with pytest.raises(ConfigError, match="it cannot be taken out"):
            run_command(fleet.aggregator_state, "forget", b'{"device": "%s"}' % lists.devices[0].encode())
        records = store.submissions.all(digest)
        assert not any(records[name].entry.digest in store.blobs for name in lists.devices), "deleted"


def test_device_that_comes_later_waits_for_a_list_of_its_own(fleet: Fleet, tmp_path: Path) -> None:
    """Its sum alone would be its own: the second operator would refuse it, and the aggregator does not ask."""
    task = prepared(fleet)
    start_operator(fleet, min_devices=MIN_DEVICES)
    fleet.start_aggregator(task)
    start_devices(fleet, range(MIN_DEVICES))
    fleet.wait_for("the head", lambda s: s["heads"])
    shutil.copytree(tmp_path / "data-0", tmp_path / "data-late")
    fleet.start_device("late", tmp_path / "data-late", *consent(tmp_path / "sums"))
    fleet.wait_for_log("aggregator", f"waiting for devices that are in no sum devices={MIN_DEVICES - 1}")
    summary = fleet.wait_for("its submission", lambda s: len(s["devices"]) == MIN_DEVICES + 1)
    assert [head["devices"] for head in summary["heads"]] == [MIN_DEVICES]


def test_device_that_the_second_operator_does_not_know_is_left_out(fleet: Fleet, tmp_path: Path) -> None:
    """The list is refused, the operator revokes the device, and the others' sum is opened."""
    task = prepared(fleet)
    fleet.start_aggregator(task)
    start_devices(fleet, range(MIN_DEVICES + 1))
    fleet.wait_for("all submissions", lambda s: s["submissions"] == MIN_DEVICES + 1)
    fleet.wait_for("the list", lambda s: s["sums"]["requested"])
    with closing(open_store(fleet.aggregator_state)) as store:
        pending = sums_of(store.facts, store.served_task().digest).pending
        assert pending is not None
        stranger = min(pending.members)
    fleet.kill("aggregator")
    names = [f"device-{number}" for number in range(MIN_DEVICES + 1)]
    keys = {name: public_key(read_key(fleet.device_state(name) / "signing.key")).hex() for name in names}
    del keys[stranger]
    known = tmp_path / "devices.txt"
    known.write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
    start_operator(fleet, "--devices", known, min_devices=MIN_DEVICES)
    fleet.wait_for_log("operator", " connected ")
    fleet.start_aggregator(task)
    fleet.wait_for("the refusal", lambda s: s["sums"] and f"{stranger} is not in" in s["sums"]["problem"])
    run_command(fleet.aggregator_state, "revoke", b'{"device": "%s"}' % stranger.encode())
    summary = fleet.wait_for("the head", lambda s: s["heads"])
    assert summary["heads"][0]["devices"] == MIN_DEVICES
    assert (summary["sums"]["devices"], summary["sums"]["requested"]) == (MIN_DEVICES, 0)
