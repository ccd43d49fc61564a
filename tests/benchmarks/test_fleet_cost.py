"""The benchmark of fleets runs the real programs beside simulated devices, and finds nothing lost."""

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.fleet import storm
from benchmarks.fleet.size import command
from tests.support.network.brokers import needs_mosquitto

pytestmark = needs_mosquitto


def test_every_device_of_a_fleet_has_the_head(tmp_path: Path) -> None:
    """The command fails if a submission or an evaluation is lost."""
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(command, ["--devices", "4", "--json", str(file)])
    assert result.exit_code == 0, result.output
    (run,) = json.loads(file.read_text())["runs"]
    assert run["devices"] == 4
    assert run["aggregator_peak_bytes"] >= run["before_bytes"] > 0


def test_idle_connections_come_back_after_a_restart_of_the_broker(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(command, ["--idle", "3", "--minutes", "0.01", "--json", str(file)])
    assert result.exit_code == 0, result.output
    phases = json.loads(file.read_text())["runs"]
    assert [phase["connected"] for phase in phases] == [0, 3, 3, 3, 3]
    assert phases[3]["attempts"] >= 3


def test_all_devices_are_served_after_each_storm(tmp_path: Path) -> None:
    """After a kill of the broker a device connects again; after one of the aggregator it only asks again."""
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(storm.command, ["--devices", "4", "--processes", "1", "--json", str(file)])
    assert result.exit_code == 0, result.output
    uploads, aggregator, rest = json.loads(file.read_text())["runs"]
    assert uploads["frames"] >= 4 <= aggregator["frames"]
    assert (aggregator["attempts"], rest["attempts"] >= 4) == (0, True)
