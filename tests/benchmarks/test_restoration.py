"""Restoration of variance where devices are in several domains."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import cli
from benchmarks.data.features import cached_name
from benchmarks.data.images import DIGITS
from benchmarks.research import restoration
from tests.benchmarks.feature_factory import domain, fill_cache


def test_restoration_benchmark_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of domains that are far apart, a linear discriminant needs the variance within devices."""
    domains = {
        cached_name(name, 2000): domain(seed, classes=10, images=300) for seed, name in enumerate(DIGITS)
    }
    fill_cache(tmp_path, monkeypatch, domains)
    monkeypatch.setattr(restoration, "ADAPTER", replace(restoration.ADAPTER, epochs=1, min_steps=0))
    file = tmp_path / "report.json"
    arguments = ["--devices", "2", "--batch", "5", "--seed", "0", "--validation", "--json", str(file)]
    result = CliRunner().invoke(cli, ["research", "restoration", *arguments])
    assert result.exit_code == 0, result.output
    runs = {run["about"]: run["accuracies"] for run in json.loads(file.read_text())["runs"]}
    assert list(runs) == ["as they are", "class", "device"]
    assert runs["device"][1] >= runs["class"][1]
    assert "B     seed         about" in result.stdout
