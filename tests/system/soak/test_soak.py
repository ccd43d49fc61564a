"""The soak loses nothing in a small fleet."""

from pathlib import Path

from tests.support.network.brokers import needs_mosquitto
from tests.system.soak.__main__ import Plan, draw, run_soak


@needs_mosquitto
def test_small_fleet_loses_nothing(tmp_path: Path) -> None:
    """Two devices that come and go, a network that fails, a broker and an aggregator that are killed."""
    folder = tmp_path / "soak"
    folder.mkdir()
    figures, samples = run_soak(folder, Plan(seconds=25, devices=2, stay_s=8, away_s=2, seed=3))
    submissions = figures["submissions"]
    assert (submissions["counted"], submissions["lost"], submissions["twice"]) == (2, 0, 0)
    assert figures["crashed"] == []
    assert sum(number for fault, number in figures["faults"].items() if "SIGKILL" in fault) > 0
    assert {"aggregator", "broker", "device-00", "device-01"} == {one.process for one in samples}
    draw(samples, tmp_path / "soak.svg")
    assert (tmp_path / "soak.svg").stat().st_size > 1000
