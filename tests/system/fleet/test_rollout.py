"""Bad heads in a real fleet: canaries evaluate them, no device keeps them, and an operator rolls back."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from aggregator.storage.open_store import open_store
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.canary_rank import canary_rank
from tests.support.fleets.fleet import Fleet, write_digits, write_task
from tests.support.network.brokers import mosquitto, require_mosquitto

CLASSES = [0, 1, 2, 3]
GOOD = ("good-1", "good-2")


@pytest.fixture
def fleet(tmp_path: Path, address: BrokerAddress) -> Iterator[Fleet]:
    require_mosquitto()
    with mosquitto(address, tmp_path), Fleet(tmp_path, address) as fleet:
        yield fleet


def _canary(version: int, devices: tuple[str, ...]) -> str:
    return min(devices, key=lambda device: canary_rank(device, version))


def _mislabel(folder: Path) -> Path:
    """Write many images of every class, each in the folder of the next one."""
    correct = write_digits(folder / "correct", classes=CLASSES, start=60, each=110)
    mislabeled = folder / "mislabeled"
    mislabeled.mkdir()
    for label, next_label in zip(CLASSES, CLASSES[1:] + CLASSES[:1], strict=True):
        (correct / str(label)).rename(mislabeled / str(next_label))
    return mislabeled


def _all_use(version: int, devices: int) -> Any:
    return lambda summary: [row["head"] for row in summary["devices"]] == [version] * devices


def _give_nan(state: Path) -> None:
    """Make a head that gives NaN the newest one, as a broken training would."""
    store = open_store(state)
    newest = store.heads.all()[-1]
    model = onnx.load_from_string(store.blobs.read(newest.digest))
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32:
            tensor.CopyFrom(numpy_helper.from_array(np.full_like(values, np.nan), tensor.name))
    file = model.SerializeToString()
    digest = store.blobs.put(file)
    store.heads.add(
        replace(newest, version=newest.version + 1, digest=digest, size_bytes=len(file), file=digest)
    )
    store.close()


def _command(fleet: Fleet, *arguments: str) -> str:
    command = [sys.executable, "-m", "aggregator.cli", *arguments, "--state", str(fleet.root / "aggregator")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_bad_heads_are_rejected_and_rolled_back(fleet: Fleet, tmp_path: Path) -> None:
    """A canary tries a head trained on incorrect labels and returns to the old one; another refuses one with NaN."""
    mislabeling = next(
        name for n in itertools.count() if _canary(2, (*GOOD, name := f"mislabeling-{n}")) in GOOD
    )
    names = (*GOOD, mislabeling)
    tables = (
        "[training]\nepochs = 30\ncalibrate = false\n[rollout]\ncanary_fraction = 0.3\nmin_canaries = 1\n"
    )
    labels = list(map(str, CLASSES))
    task = write_task(tmp_path, feature_sizes=(64,), tables=tables, classes=labels, quorum=2)
    fleet.start_aggregator(task)
    for number, name in enumerate(GOOD):
        data = write_digits(tmp_path / name, classes=CLASSES, start=30 * number, each=30)
        fleet.start_device(name, data, "--holdout", "0.4")
    fleet.wait_for("the first head", _all_use(1, 2))
    fleet.start_device(mislabeling, _mislabel(tmp_path), "--holdout", "0.1")
    summary = fleet.wait_for(
        "the rejection", lambda s: len(s["heads"]) == 2 and s["heads"][1]["state"] == "rejected"
    )
    assert "on 1 canary" in summary["heads"][1]["reason"]
    fleet.wait_for("the first head everywhere", _all_use(1, 3))
    for name in names:
        log = fleet.log(name)
        assert ("head in use head=2" in log) == (name == _canary(2, names))
        assert ("canary=True" in log) == (name == _canary(2, names))
    fleet.stop("aggregator")
    _give_nan(tmp_path / "aggregator")
    fleet.start_aggregator(task)
    summary = fleet.wait_for(
        "the refusal", lambda s: len(s["heads"]) == 3 and s["heads"][2]["state"] == "rejected"
    )
    tried = _canary(3, names)
    assert summary["heads"][2]["reason"].startswith(f"{tried} cannot use it: the head gives NaN")
    log = fleet.log(tried)
    assert "head 3 refused, the previous head stays in use" in log
    assert not [name for name in fleet.processes if "Traceback" in fleet.log(name)]
    assert _all_use(1, 3)(summary)
    assert _command(fleet, "rollback", "2") == "head 2 is current\n"
    fleet.wait_for("the second head everywhere", _all_use(2, 3))
    assert _command(fleet, "rollback") == "head 1 is current\n"
    fleet.wait_for("the first head again", _all_use(1, 3))
    assert fleet.log(GOOD[0]).count("downloading blob=head-1.onnx") == 1
