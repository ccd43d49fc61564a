"""The benchmark of ways traces real programs, and finds the project's functions in the order of their calls."""

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.cost.ways.command import command
from tests.support.network.brokers import needs_mosquitto

pytestmark = needs_mosquitto


def _ways(file: Path, *arguments: str) -> dict[str, list[str]]:
    result = CliRunner().invoke(command, ["--list", "--json", str(file), *arguments])
    assert result.exit_code == 0, result.output
    ways: dict[str, list[str]] = json.loads(file.read_text())["runs"]
    for functions in ways.values():
        assert len(functions) == len(set(functions)) > 20
        assert not any("<lambda>" in name or "<listcomp>" in name for name in functions)
    return ways


def test_each_way_is_traced_from_its_first_function_to_its_last(tmp_path: Path) -> None:
    ways = _ways(tmp_path / "figures.json")
    upload = [
        name for name in ways["upload"] if not name.startswith("aggregator/http/")
    ]  # may still be starting
    assert upload[0] == "protocol/mqtt/client.py:Connection._on_message"
    assert ways["start"][:2] == ["aggregator/cli/__init__.py:main", "protocol/cli.py:run"]
    assert "protocol/wire/signing.py:sign_manifest" in ways["head"]
    assert any(name.startswith("aggregator/algorithms/fedtc/") for name in ways["head"]), (
        "the training's process"
    )
    assert any(name.startswith("aggregator/http/") for name in ways["rollback"]), "the server's process"


def test_ways_of_a_device(tmp_path: Path) -> None:
    ways = _ways(tmp_path / "figures.json", "--program", "edge-client")
    assert ways["start"][:2] == ["edge_client/cli/__init__.py:main", "protocol/cli.py:run"]
    assert "protocol/wire/signing.py:sign_frame" in ways["images"]
    assert any(name.startswith("edge_client/submission/head_installer.py") for name in ways["head"])
    assert not any(name.startswith("aggregator/") for functions in ways.values() for name in functions)
