"""Engines that make the same head are compared."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import cli


def test_jobs_of_both_engines_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray")
    file = tmp_path / "engines.json"
    arguments = ["engines", "--devices", "60", "--features", "4", "--json", str(file)]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (run,) = json.loads(file.read_text())["runs"]
    assert run["local"][0]["head"] == run["ray"][0]["head"]
    assert min(run[engine][0]["memory_bytes"] for engine in ("local", "ray")) > 0


def test_fedtc_on_two_machines_is_measured_beside_one_process(tmp_path: Path) -> None:
    """A second run goes on where the first one ended."""
    pytest.importorskip("ray", reason="needs ray")
    file = tmp_path / "engines.json"
    arguments = ["engines-fedtc", "--prototypes", "1000", "--features", "4", "--workers", "2"]
    result = CliRunner().invoke(cli, [*arguments, "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    local, ray = json.loads(file.read_text())["runs"]
    assert (local["engine"], ray["engine"]) == ("local", "ray, 2 workers")
    assert ray["difference"] < 1e-2
    assert 0 < local["cost"]["program_bytes"] <= local["cost"]["memory_bytes"]
    again = CliRunner().invoke(
        cli, [*arguments, "--resume", str(file), "--json", str(file)], catch_exceptions=False
    )
    assert again.exit_code == 0, again.output
    assert json.loads(file.read_text())["runs"] == [local, ray]
