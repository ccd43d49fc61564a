"""Engines that make the same head are compared."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import cli


def test_jobs_of_both_engines_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray")
    file = tmp_path / "engines.json"
    arguments = ["cost", "engines", "--devices", "60", "--features", "4", "--json", str(file)]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (run,) = json.loads(file.read_text())["runs"]
    assert run["local"][0]["head"] == run["ray"][0]["head"]
    assert min(run[engine][0]["memory_bytes"] for engine in ("local", "ray")) > 0
