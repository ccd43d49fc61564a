"""`edge-client doctor`, with real brokers, images and ONNX Runtime."""

import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from aggregator.security.mosquitto_config import access_list
from edge_client.cli import cli
from edge_client.core.manifest_trust import ManifestTrust
from edge_client.store.device_state import DeviceState
from protocol.doctor import broker as broker_checks
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.topics import device_topic, fleet_topic
from tests.support.devices.device_bench import HeadBench
from tests.support.devices.device_factory import make_manifest, write_images
from tests.support.fleets.closed_fleet import FLEET, ClosedFleet, Findings, findings, publish_task, statuses
from tests.support.network.brokers import Mosquitto, free_address, needs_mosquitto
from tests.support.network.sessions import other_client

DEVICE = "shed-1"


@pytest.fixture
def closed(tmp_path: Path, address: BrokerAddress) -> ClosedFleet:
    fleet = ClosedFleet(tmp_path, address)
    fleet.enroll(DEVICE)
    return fleet


def _doctor(closed: ClosedFleet, *arguments: str) -> tuple[int, Findings]:
    data = closed.root / "data"
    if not data.exists():
        write_images(data, count=3)
    state = closed.root / "device"
    given = ["--enrollment", str(closed.root / DEVICE), "--data", str(data), "--state", str(state)]
    return findings(cli, "doctor", *given, *arguments)


@needs_mosquitto
def test_all_is_well_in_a_closed_fleet(closed: ClosedFleet) -> None:
    """With the broker's configuration as `aggregator enroll-broker` writes it; nothing is created on the device."""
    with closed.mosquitto():
        publish_task(closed)
        code, found = _doctor(closed)
    assert code == 0, found
    checks = ("broker", "tls", "login", "packets", "task", "acl", "key", "clock", "disk", "images", "runtime")
    assert {check: statuses(found)[check] for check in checks} == {
        **dict.fromkeys(checks, "ok"),
        "tls": "warning",  # the broker's certificate is valid for 30 days
    }, found
    assert "262,144 bytes" in found["packets"][0]["text"]
    assert "6 images of 2 of 2 classes" in found["images"][0]["text"]
    assert not (closed.root / "device").exists()


@pytest.mark.parametrize("fleet", ["vineyard", "default"])
def test_another_fleet_than_the_enrolled_one_is_refused(closed: ClosedFleet, fleet: str) -> None:
    given = ["--enrollment", str(closed.root / DEVICE), "--fleet", fleet]
    done = CliRunner().invoke(cli, ["doctor", *given])
    assert "omit --fleet, or use the other enrollment" in str(done.exception)


@needs_mosquitto
def test_access_list_is_found_too_narrow_or_too_wide(
    closed: ClosedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_checks, "DELIVERY_S", 0.1)  # there is no task
    up = device_topic(FLEET, DEVICE, "up")
    narrow = access_list(FLEET).replace(f"pattern write {up.replace(DEVICE, '%u')}\n", "")
    for rules, text in ((narrow, f"may not publish on {up}"), ("pattern readwrite #", "protects nothing")):
        (closed.root / "broker" / "acl").write_text(rules)
        with closed.mosquitto():
            code, found = _doctor(closed)
        assert (code, found["acl"][0]["status"]) == (1, "failed")
        assert text in found["acl"][0]["text"]
        assert found["acl"][0]["action"]


@needs_mosquitto
def test_faults_of_the_way_to_the_fleet_are_named(closed: ClosedFleet) -> None:
    """No broker, no task, a clock that is wrong, another aggregator's key, a revoked certificate."""
    code, found = _doctor(closed)
    assert (code, statuses(found)["broker"]) == (1, "failed")
    assert "login" not in found
    with closed.mosquitto():
        code, found = _doctor(closed)
        assert (code, found["task"][0]["text"]) == (
            1,
            f"the broker has no task of fleet {FLEET}: nothing is retained on pf/1/{FLEET}/task",
        )
        publish_task(closed, issued_s=time.time() + 7200)
        assert "earlier than the date of the fleet's task" in _doctor(closed)[1]["clock"][-1]["text"]
        publish_task(closed, issued_s=time.time() - 7200)
        assert "the fleet's task has expired" in _doctor(closed)[1]["clock"][-1]["text"]
        other = CliRunner().invoke(
            cli, ["doctor", "--aggregator-key", "ab" * 32, "--broker", str(closed.broker)]
        )
        assert other.exit_code == 1
        code, found = findings(
            cli, "doctor", "--aggregator-key", "ab" * 32, "--enrollment", str(closed.root / DEVICE)
        )
        assert "signed by another aggregator" in found["task"][0]["text"]
    closed.revoke(DEVICE)
    closed.publish_revocations()
    with closed.mosquitto():
        code, found = _doctor(closed)
    assert (code, statuses(found)["login"]) == (1, "failed")
    assert "revoked" in found["login"][0]["text"]


@needs_mosquitto
def test_running_device_is_not_interrupted(closed: ClosedFleet) -> None:
    """The broker would close its connection for another one with the same certificate."""
    store = DeviceState(closed.root / "device", lock=True)
    with closed.mosquitto():
        _, found = _doctor(closed)
    assert (found["login"][0]["status"], "acl" in found) == ("skipped", False), store


@needs_mosquitto
def test_open_fleet_is_a_warning(bench: HeadBench, tmp_path: Path) -> None:
    """So are a key that is not pinned, and a task that crosses a bridge at QoS 0. What is left out is named."""
    bench.store.set(ManifestTrust())
    data = tmp_path / "data"
    (data / "cats").mkdir()
    (data / "cat" / "new.heic").touch()
    with Mosquitto(free_address(), tmp_path) as broker, other_client(broker.address) as publish:
        publish(*bench.signed(make_manifest()), qos=0, retain=True)
        given = ["--broker", str(broker.address), "--data", str(data), "--state", str(bench.store.folder)]
        code, found = findings(cli, "doctor", *given, "--fleet", "f")
    assert code == 0, found
    assert "open" in found["acl"][0]["text"]
    assert {check: statuses(found)[check] for check in ("acl", "key", "task", "qos", "runtime", "images")} == {
        "acl": "warning", "key": "warning", "task": "ok", "qos": "warning", "runtime": "ok", "images": "warning",
    }  # fmt: skip
    assert f"at QoS 0, such as {fleet_topic('f', 'task')}" in found["qos"][0]["text"]
    texts = "\n".join(each["text"] for each in found["images"])
    assert "'cats' (did you mean 'cat'?): no class of the task" in texts
    assert "suffix .heic" in texts


def test_report_is_readable(tmp_path: Path) -> None:
    """Each line has a status, a check, and below it what to do."""
    done = CliRunner().invoke(
        cli, ["doctor", "--state", str(tmp_path / "state"), "--data", str(tmp_path / "none")]
    )
    assert done.exit_code == 1
    assert f"failed   images     no images at {tmp_path}/none\n" in done.output
    assert "                    do: give --data; an empty folder, to receive heads only\n" in done.output
    assert done.output.endswith("1 check failed, 1 warning\n")
