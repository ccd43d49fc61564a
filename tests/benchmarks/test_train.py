import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import cli
from benchmarks.cost.train import OURS, Head, reached
from tests.benchmarks.feature_factory import domain, fill_cache


def test_trainings_of_the_same_prototypes_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's epochs are divided among the turns."""
    fill_cache(tmp_path, monkeypatch, {"mnist": domain(0, classes=4, images=400)})
    file = tmp_path / "train.json"
    arguments = ["cost", "train", "--data", "mnist", "--epochs", "3", "--turns", "2", "--json", str(file)]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    (run,) = report["runs"]
    assert len(run["recipe"]) == 3
    assert [head["wall_s"] for head in run["recipe"]] == sorted(head["wall_s"] for head in run["recipe"])
    assert {name: len(heads) for name, heads in run["ours"].items()} == dict.fromkeys(OURS, 2)
    assert min(heads[0]["accuracy"] for heads in run["ours"].values()) > 0.9


def test_the_recipe_has_reached_its_accuracy_at_its_first_head_that_is_as_accurate() -> None:
    heads = [
        Head(accuracy=accuracy, wall_s=float(second), cpu_s=float(second))
        for second, accuracy in enumerate((0.5, 0.8, 0.7, 0.75))
    ]
    assert reached(heads).wall_s == 1
