"""The soak loses nothing in a small fleet, and reports growth."""

import subprocess
import sys
from pathlib import Path

from tests.support.network.brokers import needs_mosquitto
from tests.system.soak.__main__ import Sample, draw, growth, run_soak


def _sample(process: str, at_s: float, *, start: int = 1, memory_bytes: int = 100) -> Sample:
    return Sample(process, at_s, start, memory_bytes, handles=10, disk_bytes=1000)


def test_growth_is_a_ratio() -> None:
    """Memory that has doubled over the second half is 2; a process that was restarted is omitted."""
    samples = [_sample("aggregator", at_s, memory_bytes=100 if at_s < 75 else 200) for at_s in range(100)]
    samples += [_sample("device", at_s, start=1 + (at_s > 80)) for at_s in range(100)]
    assert growth(samples, since_s=50) == {
        "aggregator": {"memory_bytes": 2.0, "handles": 1.0, "disk_bytes": 1.0}
    }


@needs_mosquitto
def test_small_fleet_loses_nothing(tmp_path: Path) -> None:
    """Two devices that come and go, a network that fails, a broker and an aggregator that are killed."""
    folder = tmp_path / "soak"
    folder.mkdir()
    figures, samples = run_soak(folder, seconds=25, devices=2, stay_s=8, away_s=2, seed=3)
    submissions = figures["submissions"]
    assert (submissions["counted"], submissions["lost"], submissions["twice"]) == (2, 0, 0)
    assert figures["crashed"] == []
    assert sum(number for fault, number in figures["faults"].items() if "SIGKILL" in fault) > 0
    assert {"aggregator", "broker", "device-00", "device-01"} == {one.process for one in samples}
    draw(samples, tmp_path / "soak.svg")
    assert (tmp_path / "soak.svg").stat().st_size > 1000


def test_module_runs_as_a_command() -> None:
    """`python -m tests.system.soak` accepts the options of benchmarks/reports/benchmarks.md."""
    command = [sys.executable, "-m", "tests.system.soak", "--help"]
    assert "--plot" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
