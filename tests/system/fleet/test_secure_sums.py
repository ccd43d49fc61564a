"""A fleet with a second operator on real processes: nobody sees a device's sums, and the head is that of all."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from aggregator.heads.operator_commands import forget
from aggregator.intake.validation import read_message
from aggregator.storage.open_store import open_store
from aggregator.storage.sum_lists import sums_of
from protocol.errors import ConfigError
from protocol.statistics.noisy_sums import UNITS, deviations
from protocol.wire.codec import decode, to_array
from protocol.wire.messages import Submission, Tensors
from protofleet.public_map import public_map
from tests.support.fleets.fleet import CLASSES, Fleet, write_digits, write_task
from tests.support.network.brokers import free_address, mosquitto

DEVICES, EACH, SIZE = 4, 30, 12
PRIVATE = """
[privacy.dp]
epsilon = 8
map = "public.map"
max_epsilon = 10
[privacy.sums]
operator = "sums/operator.toml"
min_devices = 4
tolerance = 0.25
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with mosquitto(address := free_address(), tmp_path), Fleet(tmp_path, address) as fleet:
        yield fleet


def start_operator(fleet: Fleet, *, min_devices: int = 4) -> None:
    fleet.start(
        "operator",
        "sums_operator",
        *("run", "--state", fleet.root / "sums", "--broker", str(fleet.broker), "--fleet", "default"),
        *("--min-devices", str(min_devices)),
    )


def prepared(fleet: Fleet, folder: Path) -> Path:
    """Make the second operator's keys, the public map and the task file."""
    subprocess.run([sys.executable, "-m", "sums_operator", "init", fleet.root / "sums"], check=True)
    task = write_task(folder, quorum=DEVICES, deadline_s=3600, tables=PRIVATE, algorithm="statistics")
    public = write_digits(folder / "public", classes=list(range(10)), start=140, each=10)
    made, _ = public_map(public, folder / "backbone-0.onnx", size=SIZE)
    (folder / "public.map").write_bytes(made.to_bytes())
    return task


def start_devices(fleet: Fleet, numbers: range) -> None:
    for number in numbers:
        data = write_digits(
            fleet.root / f"data-{number}", classes=list(range(10)), start=EACH * number, each=EACH
        )
        fleet.start_device(f"device-{number}", data, "--once")


def test_head_is_of_the_sum_that_two_operators_open(fleet: Fleet, tmp_path: Path) -> None:
    """With kills of both operators on the way; the devices upload once, and are asked for nothing more."""
    task = prepared(fleet, tmp_path)
    fleet.start_aggregator(task)
    start_devices(fleet, range(DEVICES))
    fleet.wait_for_log("aggregator", "sum requested from the second operator devices=4")
    fleet.kill("aggregator")  # the list is stored, and is not opened yet
    start_operator(fleet)
    fleet.start_aggregator(task)
    for number in range(DEVICES):
        fleet.wait_exit(f"device-{number}")
    summary = fleet.wait_for("the head", lambda s: s["heads"] and s["heads"][-1]["devices"] == DEVICES)
    assert summary["heads"][0]["metrics"]["onnx_max_difference"] <= 1e-4
    assert summary["refusals"] == []
    with closing(open_store(fleet.aggregator_state)) as store:
        lists = sums_of(store.facts, store.served_task().digest)
        assert (lists.count, len(lists.devices), lists.pending) == (1, DEVICES, None)
        data = store.blobs.read(bytes.fromhex(lists.total))
        total = to_array(decode(data, Tensors, max_bytes=len(data)).values["total"]).view(np.int32)
        counts, exact = total[:10] / UNITS, DEVICES * EACH
        assert np.abs(counts - exact).max() < 8 * deviations(0.602)["counts"] / UNITS * 2
        with pytest.raises(ConfigError, match="it cannot be taken out"):
            forget(store, "device-0")
        for record in store.submissions.all(store.served_task().digest).values():
            message = read_message(store.blobs.read(record.entry.digest))
            assert isinstance(message, Submission)
            assert to_array(message.tensors["counts"]).dtype == np.uint32
    assert len(CLASSES) == 10


def test_device_that_comes_later_waits_for_a_list_of_its_own(fleet: Fleet, tmp_path: Path) -> None:
    """Its sum alone would be its own: the second operator would refuse it, and the aggregator does not ask."""
    task = prepared(fleet, tmp_path)
    start_operator(fleet)
    fleet.start_aggregator(task)
    start_devices(fleet, range(DEVICES))
    fleet.wait_for("the head", lambda s: s["heads"])
    shutil.copytree(tmp_path / "data-0", tmp_path / "data-late")
    fleet.start_device("late", tmp_path / "data-late")
    fleet.wait_for_log("aggregator", "waiting for devices that are in no sum devices=3")
    summary = fleet.wait_for("its submission", lambda s: len(s["devices"]) == DEVICES + 1)
    assert [head["devices"] for head in summary["heads"]] == [DEVICES]
