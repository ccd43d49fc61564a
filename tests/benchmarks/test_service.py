"""`python -m benchmarks device service` runs the device program and writes its figures."""

from pathlib import Path

import pytest

from benchmarks.__main__ import cli
from benchmarks.device import service
from tests.benchmarks.feature_factory import report_of
from tests.support.network.brokers import needs_mosquitto


@needs_mosquitto
def test_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle service takes at most 1.5 times the memory of its libraries, and works with 256 MB."""
    monkeypatch.setattr(service, "IDLE_S", 0.0)
    arguments = ("--model", "test_resnet", "--image-size", "32", "--images", "4", "8", "--grouped", "20")
    report = report_of(cli, tmp_path / "figures.json", "device", "service", *arguments, "--repetitions", "1")
    assert 1 < report["idle"]["edge-client"] / report["idle"]["bare libraries"] <= 1.5
    ((run,),) = (runs["8"] for runs in report["runs"]["test_resnet"].values())
    assert 0 < run["submitted_s"] <= run["wall_s"]
    (row,) = report["tables"][1]["rows"]
    assert row[-1] == ("works" if run["peak_bytes"] else "")
