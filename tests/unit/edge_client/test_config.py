"""Enrollments on the command line: what they set, and what overrides or contradicts them."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from aggregator.security.enrollment import enroll
from aggregator.storage.open_store import open_store
from edge_client.cli import cli
from edge_client.config import Settings
from edge_client.service import device
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import DeviceName
from protocol.enrollment import read_enrollment
from protocol.errors import ConfigError
from protocol.mqtt.reconnecting_session import BrokerAddress


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a device's enrollment, beside a data folder."""
    store = open_store(tmp_path / "aggregator")
    enroll(store, "shed-1", broker="broker.example", fleet="orchard", out=tmp_path / "shed-1")
    store.close()
    (tmp_path / "data" / "apple").mkdir(parents=True)
    return tmp_path / "shed-1"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Return the settings with which the program was started."""
    settings: list[Settings] = []

    class Still:
        def __init__(self, chosen: Settings, _state: DeviceState, **_: Any) -> None:
            settings.append(chosen)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(device, "Device", Still)
    return settings


def run(folder: Path, *arguments: str, **environment: str) -> None:
    """Start the program up to its settings; errors are raised."""
    options = ["--data", str(folder.parent / "data"), "--state", str(folder.parent / "state"), *arguments]
    done = CliRunner(env=environment).invoke(cli, options, standalone_mode=False)
    if done.exception is not None:
        raise done.exception


def test_an_enrollment_sets_everything(folder: Path, started: list[Settings]) -> None:
    """Device id, fleet, broker, certificates and keys, from the option or the environment."""
    run(folder, "--enrollment", str(folder))
    run(folder, PROTOFLEET_ENROLLMENT=str(folder))
    enrollment = read_enrollment(folder)
    for settings in started:
        assert settings.broker == (BrokerAddress("broker.example", 8883),)
        assert (settings.fleet, settings.device_id) == ("orchard", "shed-1")
        assert settings.access == enrollment.access
        assert settings.identity.signing_key == enrollment.signing_key
        assert settings.identity.aggregator_key == enrollment.aggregator_key
    assert len(started) == 2


def test_options_override_the_enrollment(folder: Path, started: list[Settings]) -> None:
    """Broker, authority, certificate, aggregator key and password."""
    files = ("--ca", "other.crt", "--cert", "a.crt", "--key", "a.key")
    key = ("--aggregator-key", "0a" * 32)
    run(folder, "--enrollment", str(folder), "--broker", "10.0.0.1:1", *files, *key, "--username", "shed-1")
    (settings,) = started
    assert settings.broker == (BrokerAddress("10.0.0.1", 1),)
    access = settings.access
    assert (access.ca, access.certificate, access.key) == (Path("other.crt"), Path("a.crt"), Path("a.key"))
    assert (access.username, access.tls) == ("shed-1", True)
    assert settings.identity.aggregator_key == bytes([10] * 32)
    assert settings.identity.signing_key == read_enrollment(folder).signing_key


def test_other_names_than_the_enrolled_ones_are_refused(folder: Path, started: list[Settings]) -> None:
    """The default fleet is refused too if it is given; equal names are accepted."""
    for option, value in (("--device-id", "shed-2"), ("--fleet", "vineyard"), ("--fleet", "default")):
        with pytest.raises(ConfigError, match=f"omit {option}, or use the other enrollment"):
            run(folder, "--enrollment", str(folder), option, value)
    assert started == []
    run(folder, "--enrollment", str(folder), "--device-id", "shed-1", "--fleet", "orchard")
    assert len(started) == 1


def test_an_enrollment_without_a_broker_needs_the_option(tmp_path: Path, folder: Path) -> None:
    """The error is that of a device without an enrollment."""
    store = open_store(tmp_path / "aggregator")
    enroll(store, "shed-2", fleet="orchard", out=tmp_path / "shed-2")
    store.close()
    with pytest.raises(click.UsageError, match="missing broker"):
        run(folder, "--enrollment", str(tmp_path / "shed-2"))


def test_status_finds_the_state_of_an_enrolled_device(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default state directory depends on the enrolled fleet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    DeviceState(tmp_path / "protofleet" / "orchard").set(DeviceName("shed-1"))
    done = CliRunner().invoke(cli, ["--enrollment", str(folder), "status"])
    assert done.output.startswith("device     shed-1, "), done.output


def test_a_missing_enrollment_is_an_error(tmp_path: Path, folder: Path) -> None:
    """It names the folder."""
    with pytest.raises(ConfigError, match="no enrollment in"):
        run(folder, "--enrollment", str(tmp_path / "none"))


@pytest.mark.usefixtures("started")
def test_secrets_readable_by_others_are_logged(folder: Path) -> None:
    """This holds for the certificate's key and the signing key."""
    options = ["--data", str(folder.parent / "data"), "--state", str(folder.parent / "state")]
    for name in ("device.key", "signing.key"):
        (folder / name).chmod(0o644)
        done = CliRunner().invoke(cli, [*options, "--enrollment", str(folder)])
        (folder / name).chmod(0o600)
        assert f"chmod 600 {folder / name}" in done.output
    assert "chmod" not in CliRunner().invoke(cli, [*options, "--enrollment", str(folder)]).output
