"""`aggregator doctor`, with real brokers."""

import contextlib
from pathlib import Path

import pytest

from aggregator.cli import cli
from aggregator.messaging.manifest_signer import identity_of
from aggregator.storage.open_store import open_store
from aggregator.storage.stored_values import SigningKey
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.signing import public_key
from tests.support.databases.postgresql import PostgreSQL
from tests.support.fleets.aggregator_process import write_task
from tests.support.fleets.closed_fleet import FLEET, ClosedFleet
from tests.support.fleets.doctors import findings, statuses
from tests.support.network.brokers import Mosquitto, free_address, needs_mosquitto
from tests.support.stores.object_store import BUCKET, moto_server, object_store


@pytest.fixture
def closed(tmp_path: Path, address: BrokerAddress) -> ClosedFleet:
    fleet = ClosedFleet(tmp_path, address)
    fleet.enroll("shed-1")
    return fleet


def _task(folder: Path) -> Path:
    path = write_task(folder)
    path.write_text(path.read_text().replace('fleet = "barn"', f'fleet = "{FLEET}"'))
    return path


def _options(**values: object) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


@needs_mosquitto
def test_all_is_well_in_a_closed_fleet(closed: ClosedFleet) -> None:
    given = [*_options(task=_task(closed.root), state=closed.state, broker=closed.broker), "--tls"]
    identity_of(closed.state)
    with closed.mosquitto():
        code, found = findings(cli, "doctor", *given)
    assert code == 0, found
    well = ("packages", "task", "state", "key", "broker", "login", "packets", "acl", "anonymous", "disk")
    assert {check: statuses(found)[check] for check in well} == dict.fromkeys(well, "ok"), found
    assert statuses(found)["tls"] == "warning"  # the broker's certificate is valid for 30 days
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
    given = _options(task=tmp_path / "task.toml", state=tmp_path / "state")
    code, found = findings(cli, "doctor", *given)
    assert code == 1
    expected = {"task": "failed", "state": "failed", "broker": "skipped"}
    assert {check: statuses(found)[check] for check in expected} == expected
    given = _options(task=write_task(tmp_path), state=tmp_path / "new", broker="127.0.0.1:9")
    code, found = findings(cli, "doctor", *given)
    assert (code, statuses(found)["broker"], statuses(found)["task"]) == (1, "failed", "ok")
    assert not (tmp_path / "new").exists()


def test_database_and_object_store_are_checked(
    tmp_path: Path, postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the service's configuration file names them, before the first start and after it; nothing is created."""
    config = tmp_path / "aggregator.toml"
    config.write_text(
        f'task = "{write_task(tmp_path)}"\nstate = "{tmp_path}/new"\nbroker = "127.0.0.1:9"\n'
        f'store = "{postgresql.url}"\nblobs = "s3://{BUCKET}/barn"\nhttp = "off"\nexternal-training = true\n'
    )
    given = ["doctor", "--config", str(config)]
    with moto_server(tmp_path) as address, object_store(address, monkeypatch):
        _, found = findings(cli, *given)
        assert (statuses(found)["state"], statuses(found)["blobs"]) == ("ok", "ok"), found
        assert "no aggregator state in fleet_barn" in found["state"][0]["text"]
        _, found = findings(cli, *given, "--blobs", "s3://no-such-bucket/barn")
        assert statuses(found)["blobs"] == "failed"
        assert "the bucket does not exist" in found["blobs"][0]["text"]
    assert not (tmp_path / "new").exists()
    with contextlib.closing(open_store(tmp_path / "other", database=postgresql.url, fleet="barn")) as store:
        store.facts.put(SigningKey(public_key(identity_of(store.folder)).hex()))
    _, found = findings(cli, *given)
    assert "not running" in found["state"][0]["text"]
    assert "copy the folder identity" in found["key"][0]["text"]
    _, found = findings(cli, *given, "--store", "postgresql://127.0.0.1:9/none")
    assert statuses(found)["state"] == "failed"


@needs_mosquitto
def test_narrow_access_list_is_found(tmp_path: Path) -> None:
    options = "allow_anonymous true\nacl_file {folder}/acl"
    with Mosquitto(
        free_address(), tmp_path, options=options, access_list="topic read #\ntopic write pf/1/+/task"
    ) as broker:
        given = _options(task=write_task(tmp_path), state=tmp_path / "s", broker=broker.address)
        code, found = findings(cli, "doctor", *given)
    assert (code, statuses(found)["acl"]) == (1, "failed")
    assert "/task" not in found["acl"][0]["text"]
    assert "/d/protofleet-doctor/ack" in found["acl"][0]["text"]
