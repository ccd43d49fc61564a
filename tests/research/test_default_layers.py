import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from protofleet.simulation.fleet import Features
from research.__main__ import cli
from research.defaults import default_layers
from tests.benchmarks.feature_factory import domain


def test_layers_benchmark_compares_layers_on_the_same_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Residual sums are the only informative ones here; PACS has its domains in one, with or without sketches."""
    wanted = []

    def load(name: str, *, backbone: str, image_size: int, at_most: int | None) -> Features:
        wanted.append((name, backbone, image_size, at_most))
        made = domain(0, classes=3, images=90)
        return made if backbone.endswith(":residual") else replace(made, train=0 * made.train)

    monkeypatch.setattr(default_layers, "load_features", load)
    report = tmp_path / "report.json"
    chosen = ("--data", "pacs_without_sketches", "--data", "usps", "--backbone", "mobilenetv2_100")
    arguments = ["layers", *chosen, "--images", "20", "--draws", "2", "--json", str(report)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    made = json.loads(report.read_text())
    assert [(run["data"], run["image_size"]) for run in made["runs"]] == [
        ("pacs_without_sketches", 96), ("pacs_without_sketches", 224), ("usps", 96),
    ]  # fmt: skip
    for run in made["runs"]:
        last, residual, both = np.array(run["accuracies"]).T
        assert (residual > 0.8).all()
        assert (last < 0.5).all()
        assert (last == both).all()  # the same draws
    assert ("usps", "mobilenetv2_100:last,residual", 96, default_layers.AT_MOST) in wanted
    assert ("pacs_cartoon", "mobilenetv2_100", 224, None) in wanted
    assert not any(name == "pacs_sketch" for name, *_ in wanted)
    assert len(made["tables"][1]["rows"]) == 3
