"""The benchmark of databases measures both, and deletes what it has written."""

import contextlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.cost.uploads import databases
from benchmarks.cost.uploads.databases import command
from tests.support.databases.postgresql import PostgreSQL, needs_postgresql


@needs_postgresql
def test_databases_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "ENOUGH_S", 0.01)
    file = tmp_path / "figures.json"
    with contextlib.closing(PostgreSQL()) as server:
        server.start()
        arguments = ["--store", server.url, "--devices", "20"]
        result = CliRunner().invoke(command, [*arguments, "--json", str(file)])
        assert result.exit_code == 0, result.output
        assert server.execute("SELECT 1 FROM pg_namespace WHERE nspname LIKE 'fleet%'") == []
    written = json.loads(file.read_text())
    assert len(written["tables"][0]["rows"]) == len(written["runs"]["20"]) == 6
