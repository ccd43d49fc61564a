"""Devices, an aggregator and a broker as processes: from images to a head that predicts."""

import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.http.commands import run_command
from aggregator.messaging.manifest_signer import identity_of
from aggregator.storage.open_store import open_store
from protocol.mqtt.reconnecting_session import BrokerAddress
from protofleet.public_map import public_map
from tests.support.fleets.fleet import CLASSES, QUICK, Fleet, aggregator_status, write_digits, write_task
from tests.support.graphs.backbones import without_metadata
from tests.support.network.brokers import amqtt, free_address
from tests.support.network.sessions import listening

on_mosquitto = pytest.mark.parametrize("serve", ["mosquitto"], indirect=True)
"""Once is enough where it is not the broker that matters."""


@pytest.fixture
def fleet(tmp_path: Path, broker: BrokerAddress) -> Iterator[Fleet]:
    with Fleet(tmp_path, broker) as fleet:
        yield fleet


def test_three_devices_get_a_head(fleet: Fleet, tmp_path: Path) -> None:
    """Three devices with different classes get one head; each evaluates it and predicts with it."""
    fleet.start_aggregator(write_task(tmp_path))
    names = [f"device-{number}" for number in range(3)]
    for name, share in zip(names, ([0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]), strict=True):
        fleet.start_device(name, write_digits(tmp_path / f"data-{name}", classes=share), "--once")
    for name in names:
        fleet.wait_exit(name)
    summary = fleet.wait_for("stopped devices", lambda s: all(d["state"] == "stopped" for d in s["devices"]))
    assert summary["submissions"] == 3
    assert [head["devices"] for head in summary["heads"]] == [3]
    assert summary["heads"][0]["held_out"]["devices"] == 3
    assert summary["heads"][0]["metrics"]["onnx_max_difference"] <= 1e-4
    assert all(covered["prototypes"] > 0 for covered in summary["coverage"].values())
    assert summary["refusals"] == []
    fleet.stop("aggregator")
    predicted = fleet.predict("device-0", next((tmp_path / "data-device-2" / "9").glob("*.png")))
    assert predicted["label"] in CLASSES
    assert predicted["head_version"] == 1


@on_mosquitto
def test_lost_state_of_the_aggregator_is_restored(fleet: Fleet, tmp_path: Path) -> None:
    """Devices upload their submissions again to an aggregator with an empty state, if it has the same key."""
    task = write_task(tmp_path, quorum=1)
    fleet.start_aggregator(task)
    data = write_digits(tmp_path / "data", classes=[0, 1])
    fleet.start_device("device", data, "--once")
    fleet.wait_exit("device")
    assert fleet.wait_for("the head", lambda s: s["heads"])["submissions"] == 1

    fleet.kill("aggregator")
    fleet.aggregator_state.rename(tmp_path / "lost")
    shutil.copytree(tmp_path / "lost" / "identity", fleet.aggregator_state / "identity")
    fleet.start_device("device", data)
    fleet.start_aggregator(task)
    assert fleet.wait_for("the head trained again", lambda s: s["heads"])["submissions"] == 1

    fleet.kill("aggregator")
    fleet.aggregator_state.rename(tmp_path / "lost-with-key")
    fleet.start_aggregator(task)
    summary = fleet.wait_for(
        "the refusal of the other key",
        lambda s: any(row["refused_messages"].get("signature") for row in s["devices"]),
    )
    assert fleet.log("device").count("is signed by another aggregator") == 1
    assert "--aggregator-key" in fleet.log("device")
    key = summary["aggregator_key"]
    fleet.stop("device")
    fleet.start_device("device", data, "--once", "--aggregator-key", key)
    fleet.wait_exit("device")
    assert fleet.wait_for("the head trained again", lambda s: s["heads"])["submissions"] == 1


@on_mosquitto
def test_return_to_an_earlier_task_makes_no_head(fleet: Fleet, tmp_path: Path) -> None:
    """The device's submission to it equals the one that its head is made of."""
    fleet.start_device("device", write_digits(tmp_path / "data", classes=[0, 1]))
    tasks = [""]
    for seed in (0, 1, 0):
        fleet.start_aggregator(write_task(tmp_path, quorum=1, tables=f"[client]\nseed = {seed}\n{QUICK}"))
        summary = fleet.wait_for("the task's head", lambda s: s["task"] != tasks[-1] and s["heads"])
        tasks.append(summary["task"])
        fleet.wait_for_log("device", "submission received by the aggregator", times=len(tasks) - 1)
        summary = fleet.status()
        fleet.stop("aggregator")
    assert tasks[1] == tasks[3] != tasks[2]
    assert ([head["version"] for head in summary["heads"]], summary["waiting"]) == ([1], 0)
    assert summary["training"] is None


@on_mosquitto
def test_second_program_of_the_same_name(fleet: Fleet, tmp_path: Path) -> None:
    """Of two aggregators on copies of one state the first ends with an error; of two devices of one name the second.

    The aggregator stays out when it is started again, and both name the other. The device that the aggregator knows
    continues, also when it is started last.
    """
    task = write_task(tmp_path, quorum=2)
    first = tmp_path / "first-state"
    open_store(first).close()
    identity_of(first)
    shutil.copytree(first, fleet.aggregator_state)
    fleet.start_aggregator(task, name="first", state=first)
    fleet.wait_for_log("first", "connected to the broker")
    fleet.start_aggregator(task)
    fleet.wait_exit("first", code=1)
    fleet.start_aggregator(task, name="first", state=first)
    summary = fleet.wait_for("the second aggregator's report", lambda s: s["duplicate"] is not None)
    assert not summary["duplicate"]["started_later"]
    fleet.wait_exit("first", code=1)
    assert fleet.log("first").count("this one stays out") == 2
    assert aggregator_status(first)["duplicate"]["started_later"]
    addresses = {each["address"] for each in (summary["duplicate"], aggregator_status(first)["duplicate"])}
    assert addresses == {f"{platform.node()}/127.0.0.1"}

    data = write_digits(tmp_path / "data", classes=[0, 1])
    fleet.start_device("twin", data)
    fleet.wait_for("the first device", lambda s: s["submissions"] == 1)
    time.sleep(1.1)
    options = ("--broker", str(fleet.broker), "--device-id", "twin", "--data", data)
    fleet.start("second", "edge_client.cli", *options, "--state", tmp_path / "elsewhere")
    fleet.wait_exit("second", code=1)
    assert "give each its own --device-id" in fleet.log("second")
    fleet.wait_for_log("aggregator", "the key is not the one known for twin")
    fleet.wait_for_log("twin", "another device is online under this name")
    fleet.stop("twin")
    fleet.start("second", "edge_client.cli", *options, "--state", tmp_path / "elsewhere")
    fleet.wait_for_log("second", "the key is not the one known for twin")
    fleet.start_device("twin", data)
    fleet.wait_exit("second", code=1)
    fleet.stop("twin")


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet whose aggregator trains nothing, and accepts only devices called `device-NUMBER`."""
    root = tmp_path_factory.mktemp("idle")
    names = [f"device-{number}" for number in range(9)]
    with amqtt(address := free_address()), Fleet(root, address) as fleet:
        fleet.start_aggregator(write_task(root, feature_sizes=(2048,), devices=names))
        fleet.wait_for("the aggregator", lambda s: s["running"])
        yield fleet


def test_dry_run_sends_nothing(idle: Fleet, tmp_path: Path) -> None:
    """A dry run prints what would leave the device, and the aggregator does not see it."""
    idle.start_device("device-1", write_digits(tmp_path / "data", classes=[0, 1]), command="dry-run")
    idle.wait_exit("device-1")
    assert "nothing was uploaded" in idle.log("device-1")
    assert "0: 20 images" in idle.log("device-1")
    assert "device-1" not in {row["device"] for row in idle.status()["devices"]}


def test_unlisted_device_is_refused(idle: Fleet, tmp_path: Path) -> None:
    """A device that the task file does not list ends with an error that names the reason."""
    idle.start_device("unlisted", write_digits(tmp_path / "data", classes=[0, 1]))
    idle.wait_exit("unlisted", code=1)
    (line,) = [line for line in idle.log("unlisted").splitlines() if line.startswith("error: ")]
    assert "unlisted is not among the task file's devices" in line
    idle.wait_for("the refusal", lambda s: {row["reason"] for row in s["refusals"]} == {"unknown_device"})


def test_full_disk_is_one_line_and_the_download_resumes(idle: Fleet, tmp_path: Path) -> None:
    """A device that cannot store the backbone ends with an error; with space again it resumes the download."""
    data = write_digits(tmp_path / "data", classes=[0, 1])
    idle.start_device("device-5", data, limits=("-f", "400"))
    idle.wait_exit("device-5", code=1)
    assert "Traceback" not in idle.log("device-5")
    assert "File too large" in idle.log("device-5").splitlines()[-1]
    idle.start_device("device-5", data)
    idle.wait_for("the submission", lambda s: any(row["prototypes"] for row in s["devices"]))
    assert "resumed_at=" in idle.log("device-5")
    idle.stop("device-5")


def test_unusable_broker_is_logged_once(tmp_path: Path) -> None:
    """A device whose broker closes every connection logs it once, keeps trying, and ends cleanly on SIGTERM."""
    with listening(lambda _: None) as (address, times), Fleet(tmp_path, address) as fleet:
        fleet.start_device("device", write_digits(tmp_path / "data", classes=[0, 1]), "--once")
        fleet.wait_until("the third attempt, each with MQTT 5 and 3.1.1", lambda: len(times) > 4)
        fleet.stop("device")
        (line,) = fleet.log("device").splitlines()
    assert "the broker closes the connection unanswered" in line


@on_mosquitto
def test_fleet_with_statistics_forgets_a_device(fleet: Fleet, tmp_path: Path) -> None:
    """Of sums of single images: two devices with different classes get one head, and predict.

    After `aggregator forget` of one, the other's next head is, but for its metadata, the one that it had alone.
    """
    tables = "[statistics]\nfeatures = 128\n[client]\nbatch_size = 1\nmin_images = 1\n"
    fleet.start_aggregator(write_task(tmp_path, quorum=1, algorithm="statistics", tables=tables))
    shares = ([0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9])
    data = [write_digits(tmp_path / f"data-{number}", classes=share) for number, share in enumerate(shares)]
    fleet.start_device("device-0", data[0])
    fleet.wait_for(
        "its head", lambda s: [device["head"] for device in s["devices"]] == [1] and s["head_path"]
    )
    alone = without_metadata((fleet.aggregator_state / "head.onnx").read_bytes())
    fleet.start_device("device-1", data[1], "--once")
    fleet.wait_exit("device-1")
    summary = fleet.wait_for("the common head", lambda s: s["devices"][0]["head"] == 2 and s["head_path"])
    assert (summary["algorithm"], summary["submissions"], summary["refusals"]) == ("statistics", 2, [])
    assert summary["heads"][1]["devices"] == 2
    assert summary["heads"][1]["metrics"]["onnx_max_difference"] <= 1e-4
    assert fleet.device_status("device-0")["report"]["warning"]
    assert without_metadata((fleet.aggregator_state / "head.onnx").read_bytes()) != alone
    predicted = fleet.predict("device-0", next((data[1] / "9").glob("*.png")))
    assert predicted["label"] in CLASSES
    said = run_command(fleet.aggregator_state, "forget", b'{"device": "device-1"}').message
    assert "head 2 is made again without it now" in said
    fleet.wait_for("the head without it", lambda s: s["devices"][0]["head"] == 3 and s["head_path"])
    assert without_metadata((fleet.aggregator_state / "head.onnx").read_bytes()) == alone


@on_mosquitto
def test_private_fleet_gets_a_head(fleet: Fleet, tmp_path: Path) -> None:
    """Under differential privacy both sides show the privacy loss; exact counts stay on the device."""
    private = '[privacy.dp]\nepsilon = 8\nmap = "public.map"\nmax_epsilon = 10\n'
    task = write_task(tmp_path, quorum=2, tables=private, algorithm="statistics")
    public = write_digits(tmp_path / "public", classes=list(range(10)), start=100, each=10)
    made, unusable = public_map(public, tmp_path / "backbone-0.onnx", size=12)
    assert not unusable
    (tmp_path / "public.map").write_bytes(made.to_bytes())
    fleet.start_aggregator(task)
    names = ("device-0", "device-1")
    for name in names:
        data = write_digits(tmp_path / f"data-{name}", classes=list(range(10)), each=30)
        fleet.start_device(name, data, "--once")
    for name in names:
        fleet.wait_exit(name)
    summary = fleet.wait_for("stopped devices", lambda s: all(d["state"] == "stopped" for d in s["devices"]))
    assert [head["devices"] for head in summary["heads"]] == [2]
    assert [row["epsilon"] for row in summary["devices"]] == [pytest.approx(8.0, rel=1e-2)] * 2
    figures = [(row["images"], row["correct"], row["incorrect"]) for row in summary["devices"]]
    assert figures == [(0, 0, 0)] * 2
    assert summary["refusals"] == []
    own = fleet.device_status("device-0")
    assert own["privacy"]["total_epsilon"] == summary["devices"][0]["epsilon"]
    assert sum(entry["images"] for entry in own["report"]["classes"]) == 300, (
        "the owner sees the exact counts"
    )
    assert fleet.processes["aggregator"].poll() is None
