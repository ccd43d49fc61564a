"""`aggregator doctor`, with real brokers."""

from pathlib import Path

import pytest

from aggregator.cli import cli
from aggregator.messaging.manifest_signer import identity_of
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.signing import public_key
from tests.support.fleets.aggregator_process import write_task
from tests.support.fleets.closed_fleet import FLEET, ClosedFleet
from tests.support.fleets.doctors import findings, statuses
from tests.support.network.brokers import Mosquitto, free_address, needs_mosquitto


@pytest.fixture
def closed(tmp_path: Path, address: BrokerAddress) -> ClosedFleet:
    fleet = ClosedFleet(tmp_path, address)
    fleet.enroll("shed-1")
    return fleet


def _task(folder: Path) -> Path:
    path = write_task(folder)
    path.write_text(path.read_text().replace('fleet = "barn"', f'fleet = "{FLEET}"'))
    return path


@needs_mosquitto
def test_all_is_well_in_a_closed_fleet(closed: ClosedFleet) -> None:
    given = [
        "--task",
        str(_task(closed.root)),
        "--state",
        str(closed.state),
        "--broker",
        str(closed.broker),
        "--tls",
    ]
    identity_of(closed.state)
    with closed.mosquitto():
        code, found = findings(cli, "doctor", *given)
    assert code == 0, found
    checks = (
        "packages",
        "task",
        "state",
        "key",
        "broker",
        "tls",
        "login",
        "packets",
        "acl",
        "anonymous",
        "disk",
    )
    assert {check: statuses(found)[check] for check in checks} == {
        **dict.fromkeys(checks, "ok"),
        "tls": "warning",  # the broker's certificate is valid for 30 days
    }, found
    assert public_key(identity_of(closed.state)).hex() in found["key"][0]["text"]
    text = closed.configuration().replace("allow_anonymous false", "allow_anonymous true")
    for line in (
        "require_certificate true",
        "use_identity_as_username true",
        "use_username_as_clientid true",
    ):
        text = text.replace(line, "")
    with closed.mosquitto(text):
        code, found = findings(cli, "doctor", *given)
    assert (code, statuses(found)["anonymous"]) == (1, "failed")


def test_faults_are_named(tmp_path: Path) -> None:
    """Each has its own line: a task file, a state directory and a broker."""
    (tmp_path / "task.toml").write_text("x = 1\n")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "device.sqlite").touch()
    given = ["--task", str(tmp_path / "task.toml"), "--state", str(tmp_path / "state")]
    code, found = findings(cli, "doctor", *given)
    assert code == 1
    assert [statuses(found)[check] for check in ("task", "state", "broker")] == [
        "failed",
        "failed",
        "skipped",
    ]
    code, found = findings(
        cli,
        "doctor",
        "--task",
        str(write_task(tmp_path)),
        "--state",
        str(tmp_path / "new"),
        "--broker",
        "127.0.0.1:9",
    )
    assert (code, statuses(found)["broker"], statuses(found)["task"]) == (1, "failed", "ok")
    assert not (tmp_path / "new").exists()


@needs_mosquitto
def test_narrow_access_list_is_found(tmp_path: Path) -> None:
    options = "allow_anonymous true\nacl_file {folder}/acl"
    with Mosquitto(
        free_address(), tmp_path, options=options, access_list="topic read #\ntopic write pf/1/+/task"
    ) as broker:
        given = [
            "--task",
            str(write_task(tmp_path)),
            "--state",
            str(tmp_path / "s"),
            "--broker",
            str(broker.address),
        ]
        code, found = findings(cli, "doctor", *given)
    assert (code, statuses(found)["acl"]) == (1, "failed")
    assert "/task" not in found["acl"][0]["text"]
    assert "/d/protofleet-doctor/ack" in found["acl"][0]["text"]
