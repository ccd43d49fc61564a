"""The ingest benchmark measures the real programs and writes its figures."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.cost.uploads.ingest import DISCARDS, OURS, STORES, command
from tests.support.network.brokers import needs_mosquitto


@needs_mosquitto
def test_ingest_benchmark_writes_its_figures(tmp_path: Path) -> None:
    """Every receiver gets every message, the aggregator accepts every submission, and each cost is compared."""
    file = tmp_path / "figures.json"
    arguments = ["--devices", "2", "--megabytes", "0.2", "--load", "0.8", "--repetitions", "1"]
    result = CliRunner().invoke(command, [*arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert [row[0] for row in written["tables"][0]["rows"]] == [DISCARDS, STORES, OURS]
    for name in (DISCARDS, STORES, OURS):
        (run,) = written["runs"]["0.2"][name]
        assert run["submissions"] == 4
        assert run["bytes"] == pytest.approx(0.8e6, rel=0.05)
        assert run["wall_s"] > 0
        assert min(run["receiver_s"], run["broker_s"]) >= 0, (
            "so few bytes may take less than the kernel counts"
        )
    figures = written["figures"]["0.2"]
    assert figures["wall_s_lowest"] <= figures["wall_s"] <= figures["wall_s_highest"]
