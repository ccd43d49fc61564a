"""Real devices, a real aggregator and a real broker, as processes: from images to a head that predicts."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner
from PIL import Image

from edge_client.cli import cli as edge_client
from protocol.mqtt.session import BrokerAddress
from tests.support.fleet_processes import PATIENCE_S, Fleet, write_digits
from tests.support.graphs import tiny_backbone

CLASSES = [str(digit) for digit in range(10)]

on_mosquitto = pytest.mark.parametrize("serve", ["mosquitto"], indirect=True)
"""Once is enough where it is not the broker that matters."""


@pytest.fixture
def fleet(tmp_path: Path, broker: BrokerAddress) -> Iterator[Fleet]:
    """A fleet that is taken down at the end."""
    fleet = Fleet(tmp_path, broker)
    yield fleet
    fleet.stop()


def write_task(folder: Path, *, feature_size: int = 16, **settings: object) -> Path:
    """Write a task file and its backbone."""
    (folder / "backbone.onnx").write_bytes(tiny_backbone(feature_size=feature_size))
    values = {"classes": CLASSES, "backbones": ["backbone.onnx"], "quorum": 3, "deadline_s": 600, **settings}
    task = folder / "task.toml"
    task.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return task


def test_three_devices_get_a_head(fleet: Fleet, tmp_path: Path) -> None:
    """Three devices with different classes end with one head for all of them, evaluated and predicting."""
    aggregator = fleet.aggregator(write_task(tmp_path))
    shares = ([0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9])
    devices = [
        fleet.device(f"device-{number}", write_digits(tmp_path / f"data-{number}", classes=share), "--once")
        for number, share in enumerate(shares)
    ]
    for device in devices:
        fleet.wait_exit(device)
    summary = fleet.wait_for(
        "the devices' farewells", lambda s: all(d["state"] == "stopped" for d in s["devices"])
    )
    assert summary["submissions"] == 3
    assert [head["devices"] for head in summary["heads"]] == [3]
    assert summary["heads"][0]["held_out"]["devices"] == 3
    assert summary["heads"][0]["metrics"]["onnx_max_abs_diff"] <= 1e-4
    assert all(covered["prototypes"] > 0 for covered in summary["coverage"].values())
    assert summary["refusals"] == []
    aggregator.terminate()
    fleet.wait_exit(aggregator)
    _check_prediction(fleet, tmp_path)
    _check_fused_model(tmp_path)


def _check_prediction(fleet: Fleet, folder: Path) -> None:
    """Without broker and aggregator, a device names classes that it never had images of."""
    image = next((folder / "data-2" / "9").glob("*.png"))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "edge_client.cli",
            "predict",
            "--json",
            "--state",
            fleet.root / "devices/device-0",
            image,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    line = json.loads(done.stdout)
    assert line["label"] in CLASSES
    assert line["head_version"] == 1


def _check_fused_model(folder: Path) -> None:
    """`model.onnx` takes images and gives the probabilities of the classes."""
    session = onnxruntime.InferenceSession(folder / "aggregator" / "model.onnx")
    _, height, width, _ = session.get_inputs()[0].shape
    image = next((folder / "data-0" / "1").glob("*.png"))
    with Image.open(image) as opened:
        pixels = np.asarray(opened.convert("RGB").resize((width, height)))[None]
    (probabilities,) = session.run(["probabilities"], {"image": pixels})
    assert probabilities.shape == (1, len(CLASSES))
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-4)


@on_mosquitto
def test_late_device_is_in_the_next_head(fleet: Fleet, tmp_path: Path) -> None:
    """The deadline closes the collection without the missing device; who comes late makes the next head."""
    fleet.aggregator(write_task(tmp_path, quorum=3, deadline_s=2, retrain_after=1))
    data = [write_digits(tmp_path / f"data-{n}", classes=[n, n + 1]) for n in range(2)]
    fleet.device("early", data[0])
    fleet.wait_for("the first head", lambda s: len(s["heads"]) == 1)
    late = fleet.device("late", data[1], "--once")
    fleet.wait_exit(late)
    summary = fleet.wait_for("the second head", lambda s: len(s["heads"]) == 2)
    assert [head["devices"] for head in summary["heads"]] == [1, 2]
    fleet.wait_for("the early device's evaluation", lambda s: s["heads"][1]["held_out"]["devices"] >= 1)


def test_restarts_change_nothing(fleet: Fleet, tmp_path: Path) -> None:
    """An aggregator and a device that are killed and started again go on with what they had."""
    task = write_task(tmp_path, quorum=1)
    aggregator = fleet.aggregator(task)
    data = write_digits(tmp_path / "data", classes=[0, 1])
    device = fleet.device("device", data)
    before = fleet.wait_for(
        "the head and its evaluation", lambda s: s["heads"] and s["heads"][0]["held_out"]["devices"]
    )
    for process in (aggregator, device):
        process.kill()
        process.wait()
    fleet.aggregator(task)
    fleet.wait_exit(fleet.device("device", data, "--once"))
    after = fleet.wait_for("the restarted fleet", lambda s: s["running"] and s["heads"])
    assert after["submissions"] == 1
    assert [head["sha256"] for head in after["heads"]] == [head["sha256"] for head in before["heads"]]


@on_mosquitto
def test_new_images_make_a_new_head(fleet: Fleet, tmp_path: Path) -> None:
    """A device that runs as a service notices new images, and its newer submission replaces the older."""
    fleet.aggregator(write_task(tmp_path, quorum=1, retrain_after=1))
    data = write_digits(tmp_path / "data", classes=[0, 1])
    fleet.device("device", data, "--rescan-s", "0.5")
    first = fleet.wait_for("the first head", lambda s: s["heads"])
    write_digits(data, classes=[2], start=0)
    second = fleet.wait_for("the second head", lambda s: len(s["heads"]) == 2)
    assert second["submissions"] == 1
    assert second["heads"][1]["prototypes"] > first["heads"][0]["prototypes"]
    assert second["coverage"]["2"]["prototypes"] > 0


@on_mosquitto
def test_a_lost_aggregator_state_is_made_up_for(fleet: Fleet, tmp_path: Path) -> None:
    """An aggregator that starts with nothing but its key gets every submission again, and makes the head anew."""
    task = write_task(tmp_path, quorum=1)
    aggregator = fleet.aggregator(task)
    fleet.device("device", write_digits(tmp_path / "data", classes=[0, 1]))
    fleet.wait_for("the first head", lambda s: s["heads"] and s["heads"][0]["held_out"]["devices"])
    aggregator.kill()
    aggregator.wait()
    (tmp_path / "aggregator").rename(tmp_path / "lost")
    shutil.copytree(tmp_path / "lost" / "identity", tmp_path / "aggregator" / "identity")
    fleet.aggregator(task)
    summary = fleet.wait_for("the head made anew", lambda s: s["heads"])
    assert summary["submissions"] == 1


@on_mosquitto
def test_an_aggregator_that_has_lost_its_key_is_another_one(fleet: Fleet, tmp_path: Path) -> None:
    """Devices do not believe it, and say what to do; once they are given its key, they do."""
    task = write_task(tmp_path, quorum=1)
    aggregator = fleet.aggregator(task)
    data = write_digits(tmp_path / "data", classes=[0, 1])
    device = fleet.device("device", data)
    fleet.wait_for("the first head", lambda s: s["heads"] and s["heads"][0]["held_out"]["devices"])
    aggregator.kill()
    aggregator.wait()
    (tmp_path / "aggregator").rename(tmp_path / "lost")
    fleet.aggregator(task)
    summary = fleet.wait_for(
        "the device's word", lambda s: any(row["refusals"].get("signature") for row in s["devices"])
    )
    said = (tmp_path / "device.log").read_text()
    assert said.count("is signed by another aggregator") == 1
    assert "--aggregator-key" in said
    device.terminate()
    fleet.wait_exit(device)
    fleet.wait_exit(fleet.device("device", data, "--once", "--aggregator-key", summary["key"]))
    assert fleet.wait_for("the head made anew", lambda s: s["heads"])["submissions"] == 1


def test_a_fleet_has_one_aggregator(fleet: Fleet, tmp_path: Path) -> None:
    """A second aggregator of the same fleet takes over, and the first one ends and says why."""
    task = write_task(tmp_path, quorum=1)
    first = fleet.start(
        *("first", "aggregator.cli", "run", "--task", task),
        *("--state", tmp_path / "first", "--broker", str(fleet.broker)),
    )
    deadline = time.monotonic() + 20
    while "connected" not in fleet.logs() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.1)  # starts are told apart by the second
    fleet.aggregator(task)
    fleet.wait_exit(first, code=1)
    assert "another aggregator" in (tmp_path / "first.log").read_text()
    fleet.wait_exit(fleet.device("device", write_digits(tmp_path / "data", classes=[0, 1]), "--once"))


def test_a_name_is_one_devices(fleet: Fleet, tmp_path: Path) -> None:
    """A second device of the same name takes over, and the first one ends and says what to do."""
    fleet.aggregator(write_task(tmp_path, quorum=2))
    data = write_digits(tmp_path / "data", classes=[0, 1])
    first = fleet.device("twin", data)
    fleet.wait_for("the first device", lambda s: s["submissions"] == 1)
    time.sleep(1.1)  # starts are told apart by the second
    fleet.start(
        *("second", "edge_client.cli", "--broker", str(fleet.broker), "--device-id", "twin"),
        *("--data", data, "--state", tmp_path / "elsewhere"),
    )
    fleet.wait_exit(first, code=1)
    assert "give each its own --device-id" in (tmp_path / "twin.log").read_text()
    fleet.wait_for("the second device", lambda s: s["devices"][0]["state"] == "online")


@on_mosquitto
def test_dry_run_sends_nothing(fleet: Fleet, tmp_path: Path) -> None:
    """A dry run says what would leave the device, and the aggregator hears of no device."""
    fleet.aggregator(write_task(tmp_path, quorum=1))
    data = write_digits(tmp_path / "data", classes=[0, 1])
    fleet.wait_exit(fleet.device("device", data, "--dry-run"))
    said = (tmp_path / "device.log").read_text()
    assert "nothing was sent" in said
    assert "0: 20 images" in said
    summary = fleet.wait_for("the aggregator", lambda s: s["running"])
    assert summary["devices"] == []
    assert summary["submissions"] == 0


@on_mosquitto
@pytest.mark.parametrize("folder", ["cat", None])
def test_wrong_folder_is_one_line(fleet: Fleet, tmp_path: Path, folder: str | None) -> None:
    """A folder that is no class of the task, or no image at all: one line, exit status 1, nothing uploaded."""
    fleet.aggregator(write_task(tmp_path, quorum=1))
    data = tmp_path / "data"
    data.mkdir()
    if folder is not None:
        write_digits(data, classes=[0]).joinpath("0").rename(data / folder)
    fleet.wait_exit(fleet.device("device", data, "--once"), code=1)
    said = (tmp_path / "device.log").read_text()
    assert "Traceback" not in said
    assert len([line for line in said.splitlines() if line.startswith("error: ")]) == 1
    assert fleet.wait_for("the aggregator", lambda s: s["running"])["submissions"] == 0


@on_mosquitto
def test_other_backbone_is_refused_with_both_digests(fleet: Fleet, tmp_path: Path) -> None:
    """A local backbone that is not the task's is refused, and the line names both digests."""
    fleet.aggregator(write_task(tmp_path, quorum=1))
    other = tmp_path / "other.onnx"
    other.write_bytes(tiny_backbone(seed=1))
    data = write_digits(tmp_path / "data", classes=[0, 1])
    fleet.wait_exit(fleet.device("device", data, "--once", "--backbone", str(other)), code=1)
    said = (tmp_path / "device.log").read_text()
    assert said.count("sha256") >= 1
    assert "Traceback" not in said


@on_mosquitto
def test_a_device_that_is_not_listed_is_told_so(fleet: Fleet, tmp_path: Path) -> None:
    """Where the task file lists the devices, another one ends with a line that says why."""
    fleet.aggregator(write_task(tmp_path, devices=["camera-1", "camera-2"]))
    fleet.wait_exit(fleet.device("stranger", write_digits(tmp_path / "data", classes=[0, 1])), code=1)
    assert "stranger is not among the task file's devices" in (tmp_path / "stranger.log").read_text()
    summary = fleet.wait_for("the aggregator", lambda s: s["running"])
    assert summary["submissions"] == 0
    assert {refusal["reason"] for refusal in summary["refusals"]} == {"unknown_device"}


@on_mosquitto
def test_a_full_disk_is_one_line_and_harms_nothing(fleet: Fleet, tmp_path: Path) -> None:
    """A device that cannot store the backbone says so and ends; with room again it goes on where it was."""
    fleet.aggregator(write_task(tmp_path, quorum=1, feature_size=2048))
    data = write_digits(tmp_path / "data", classes=[0, 1])
    fleet.wait_exit(fleet.device("device", data, "--once", file_kb=200), code=1)
    said = (tmp_path / "device.log").read_text()
    assert "Traceback" not in said
    assert "File too large" in said.splitlines()[-1]
    fleet.wait_exit(fleet.device("device", data, "--once"))
    assert "(going on)" in (tmp_path / "device.log").read_text()


@on_mosquitto
def test_a_state_that_cannot_be_written_is_one_line(fleet: Fleet, tmp_path: Path) -> None:
    """A state folder that cannot be made is told with its path before anything is done."""
    (tmp_path / "devices").write_text("a file, not a folder")
    data = write_digits(tmp_path / "data", classes=[0, 1])
    fleet.wait_exit(fleet.device("device", data, "--once"), code=1)
    (line,) = (tmp_path / "device.log").read_text().splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path / "devices") in line


def test_without_a_broker_a_line_says_so(tmp_path: Path, address: BrokerAddress) -> None:
    """A device whose broker is away says so once, keeps trying, and ends cleanly when it is told to."""
    fleet = Fleet(tmp_path, address)
    device = fleet.device("device", write_digits(tmp_path / "data", classes=[0, 1]), "--once")
    deadline = time.monotonic() + PATIENCE_S
    while "no broker" not in (tmp_path / "device.log").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(5)  # for a second line that should not come
    device.terminate()
    fleet.wait_exit(device, code=0)
    (line,) = (tmp_path / "device.log").read_text().splitlines()
    assert f"no broker at {address}" in line


@on_mosquitto
def test_a_private_fleet_gets_a_head(fleet: Fleet, tmp_path: Path) -> None:
    """Under differential privacy: noisy prototypes make a head, what was spent is shown on both sides, and no count."""
    task = write_task(tmp_path, quorum=2)
    private = "[client]\nbatch_size = 20\n[privacy.dp]\nepsilon = 8\nclip_norm = 1\nmax_epsilon = 10\n"
    task.write_text(task.read_text() + private)
    aggregator = fleet.aggregator(task)
    devices = [
        fleet.device(
            f"device-{number}",
            write_digits(tmp_path / f"data-{number}", classes=list(range(10)), each=90),
            "--once",
        )
        for number in range(2)
    ]
    for device in devices:
        fleet.wait_exit(device)
    summary = fleet.wait_for(
        "the devices' farewells", lambda s: all(d["state"] == "stopped" for d in s["devices"])
    )
    assert [head["devices"] for head in summary["heads"]] == [2]
    assert [row["epsilon"] for row in summary["devices"]] == [pytest.approx(8.0, rel=1e-2)] * 2
    assert [(row["images"], row["correct"], row["incorrect"]) for row in summary["devices"]] == [
        (0, 0, 0)
    ] * 2
    assert summary["refusals"] == []
    state = str(tmp_path / "devices" / "device-0")
    own = json.loads(CliRunner().invoke(edge_client, ["status", "--json", "--state", state]).output)
    assert own["privacy"]["total_epsilon"] == summary["devices"][0]["epsilon"]
    assert sum(entry["images"] for entry in own["report"]["classes"]) == 900, "the owner sees what is there"
    assert aggregator.poll() is None
