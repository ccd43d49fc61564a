"""Fleets that change: bad heads, a calibrated head, an added class, a raised quota, an object store that fails."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image

from aggregator.cluster.object_blobs import ObjectBlobs
from aggregator.storage.open_store import open_store
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.canary_rank import canary_rank
from tests.support.fleets.fleet import (
    QUICK,
    Fleet,
    accepted_submissions,
    with_startup_code,
    write_digits,
    write_task,
)
from tests.support.network.brokers import mosquitto
from tests.support.stores.object_store import BUCKET, moto_server, object_store

LABELS = [0, 1, 2, 3]
GOOD = ("good-1", "good-2")


@pytest.fixture
def fleet(tmp_path: Path, address: BrokerAddress) -> Iterator[Fleet]:
    with mosquitto(address, tmp_path), Fleet(tmp_path, address) as fleet:
        yield fleet


def _canary(version: int, devices: tuple[str, ...]) -> str:
    return min(devices, key=lambda device: canary_rank(device, version))


def _mislabel(folder: Path) -> Path:
    """Write many images of every class, each in the folder of the next one."""
    correct = write_digits(folder / "correct", classes=LABELS, start=60, each=110)
    mislabeled = folder / "mislabeled"
    mislabeled.mkdir()
    for label, next_label in zip(LABELS, LABELS[1:] + LABELS[:1], strict=True):
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
    made = replace(newest, version=newest.version + 1, state="made", place=0)
    store.heads.put(replace(made, digest=digest, size_bytes=len(file), file=digest))
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
    labels = list(map(str, LABELS))
    task = write_task(tmp_path, feature_sizes=(64,), tables=tables, classes=labels, quorum=2)
    fleet.start_aggregator(task)
    for number, name in enumerate(GOOD):
        data = write_digits(tmp_path / name, classes=LABELS, start=30 * number, each=30)
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
        "the refusal, and the first head everywhere",
        lambda s: len(s["heads"]) == 3 and s["heads"][2]["state"] == "rejected" and _all_use(1, 3)(s),
    )
    tried = _canary(3, names)
    assert summary["heads"][2]["reason"].startswith(f"{tried} cannot use it: the head gives NaN")
    log = fleet.log(tried)
    assert "head 3 refused, the previous head stays in use" in log
    assert not [name for name in fleet.processes if "Traceback" in fleet.log(name)]
    assert _command(fleet, "rollback", "2") == "head 2 is current\n"
    fleet.wait_for("the second head everywhere", _all_use(2, 3))
    assert _command(fleet, "rollback") == "head 1 is current\n"
    fleet.wait_for("the first head again", _all_use(1, 3))
    assert fleet.log(GOOD[0]).count("downloading blob=head-1.onnx") == 1


HANGING_CALIBRATION = """
import sys
if "aggregator.training.job_program" in sys.orig_argv:
    import time
    from aggregator.training import calibration_job
    calibration_job.run = lambda *_: time.sleep(600)
"""


def test_fleet_gets_one_calibrated_head(fleet: Fleet, tmp_path: Path) -> None:
    """It is as accurate as the head that it calibrates, and devices predict with it, or answer `unknown`."""
    task, names = write_task(tmp_path, quorum=3), ["a", "b", "c"]
    with patch.dict(os.environ, with_startup_code(tmp_path / "hanging", HANGING_CALIBRATION)):
        fleet.start_aggregator(task)
    for name in names:
        data = write_digits(tmp_path / f"data-{name}", classes=[0, 1, 2, 3], each=40)
        fleet.start_device(name, data)
    jobs = fleet.aggregator_state / "training"
    fleet.wait_until("the calibration", lambda: any(jobs.glob("head-2-*/training.log")))
    fleet.kill("aggregator")
    assert [head["version"] for head in fleet.status()["heads"]] == [1]
    for starts in (2, 3):
        fleet.start_aggregator(task)
        fleet.wait_for_log("aggregator", "connected to the broker", times=starts)
        summary = fleet.wait_for(
            "the calibrated head everywhere",
            lambda s: (
                len(s["heads"]) == 2 and s["heads"][1]["held_out"]["devices"] == 3 and _all_use(2, 3)(s)
            ),
        )
        fleet.stop("aggregator")
    first, second = summary["heads"]
    assert (second["state"], second["metrics"]["calibrated_from"]) == ("current", 1)
    assert second["metrics"]["calibration_images"] == 3 * 4 * 8
    assert second["held_out"]["correct"] == first["held_out"]["correct"]
    image = next((tmp_path / "data-a" / "0").glob("*.png"))
    predicted = fleet.predict("a", image)
    assert (predicted["head_version"], predicted["known"]) == (2, True)
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).save(foreign := tmp_path / "foreign.png")
    assert fleet.predict("a", foreign)["answer"] == "unrecognized"
    assert fleet.log("aggregator").count("head calibrated version=2 of=1 held_out_images=96") == 1


def _uploads(fleet: Fleet, name: str) -> int:
    return fleet.log(name).count("submission built")


@pytest.mark.parametrize("algorithm", ["fedtc", "statistics"])
def test_added_class_is_uploaded_by_its_device_alone(fleet: Fleet, tmp_path: Path, algorithm: str) -> None:
    """The head of the continued task knows all classes; the submissions stay valid after a restart, too."""
    task, names = write_task(tmp_path, algorithm=algorithm, tables="", classes=list("0123")), ["a", "b", "c"]
    fleet.start_aggregator(task)
    for name in names:
        fleet.start_device(name, write_digits(tmp_path / f"data-{name}", classes=[0, 1, 2, 3], each=25))
    before = fleet.wait_for(
        "the first head", lambda s: s["heads"] and s["heads"][0]["held_out"]["devices"] == 3
    )
    fleet.stop("aggregator")
    write_digits(tmp_path / "data-a", classes=[4], each=25)
    added = {"classes": list("01234"), "continues": before["task"]}
    task = write_task(tmp_path, algorithm=algorithm, tables="", **added)
    fleet.start_aggregator(task)
    after = fleet.wait_for(
        "a head of the new class",
        lambda s: (
            s["task"] != before["task"]
            and s["coverage"]["4"]["devices"] == 1
            and s["waiting"] == 0
            and all(device["head"] == s["rollout"]["newest"] > 0 for device in s["devices"])
        ),
    )
    assert after["submissions"] == 3
    assert [_uploads(fleet, name) for name in names] == [2, 1, 1]
    assert fleet.log("aggregator").count("submissions of the continued task count submissions=3") == 1
    image = next((tmp_path / "data-a" / "4").glob("*.png"))
    assert fleet.predict("b", image)["label"] == "4"
    assert json.dumps(after["refusals"]) == json.dumps(before["refusals"])
    fleet.stop("aggregator")
    fleet.start_aggregator(task)
    fleet.wait_for_log("aggregator", "connected to the broker", times=3)
    again = fleet.status()
    assert (again["task"], again["submissions"]) == (after["task"], 3)
    assert [_uploads(fleet, name) for name in names] == [2, 1, 1]


def test_device_over_the_quota_logs_it_and_uploads_once_it_is_raised(fleet: Fleet, tmp_path: Path) -> None:
    """By itself, after the aggregator's restart; until then the other device's upload counts alone."""

    def task(devices: int) -> Path:
        return write_task(tmp_path, quorum=9, tables=f"{QUICK}[limits]\nmax_devices = {devices}\n")

    fleet.start_aggregator(task(1))
    fleet.start_device("first", write_digits(tmp_path / "a", classes=[0, 1]))
    fleet.wait_for("the first upload", lambda status: status["submissions"] == 1)
    fleet.start_device("second", write_digits(tmp_path / "b", classes=[1, 2]))
    text = "the fleet has as many devices as limits.max_devices allows (1), and second would be another one"
    fleet.wait_for_log("second", f"the aggregator refused to send backbone-0.onnx (quota): {text}")
    status = fleet.wait_for("the refusal", lambda status: status["refusals"])
    assert {row["reason"] for row in status["refusals"]} == {"quota"}
    assert status["quotas"]["devices"] == {"used": 1, "limit": 1}
    fleet.stop("aggregator")
    fleet.start_aggregator(task(2))
    fleet.wait_for_log("aggregator", "submission accepted device=second")
    assert sorted(name for name, _ in accepted_submissions(fleet.log("aggregator"))) == [
        "first",
        "second",
    ]


@pytest.mark.timeout(600)
def test_head_is_trained_of_blobs_in_an_object_store(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store answers nothing but 503, the program ends; started again, it counts each submission once.

    A restart needs no option, since the database says where the blobs are.
    """
    location = f"s3://{BUCKET}/herd"
    with moto_server(tmp_path) as server, object_store(server, monkeypatch) as store:
        task = write_task(tmp_path)
        fleet.start_aggregator(task, "--blobs", location)
        fleet.wait_for_log("aggregator", "connected to the broker")
        store.status = 503
        names = [f"device-{number}" for number in range(3)]
        for name, share in zip(names, ([0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]), strict=True):
            fleet.start_device(name, write_digits(tmp_path / f"data-{name}", classes=share), "--once")
        fleet.wait_for_log("aggregator", "program ended program=serve")
        assert f"cannot use {location}" in fleet.log("aggregator")
        assert accepted_submissions(fleet.log("aggregator")) == []
        store.heal()
        for name in names:
            fleet.wait_exit(name)
        summary = fleet.wait_for("the head", lambda s: s["heads"] and s["head_path"])
        assert summary["submissions"] == 3
        assert summary["heads"][0]["devices"] == 3
        assert sorted(name for name, _ in accepted_submissions(fleet.log("aggregator"))) == names
        assert not list((fleet.aggregator_state / "blobs").glob("*"))
        fleet.stop("aggregator")
        fleet.start_aggregator(task)
        fleet.wait_for_log("aggregator", "connected to the broker", times=3)
        assert fleet.status()["submissions"] == 3
        fleet.stop("aggregator")
        assert "do-not-log-this" not in fleet.log("aggregator")
        assert len(set(ObjectBlobs(location).digests())) >= 5
