"""The ingest benchmark measures the real programs and writes its figures."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.cost.ingest import ingest
from tests.support.network.brokers import mosquitto_program


@pytest.mark.skipif(mosquitto_program() is None, reason="mosquitto is not installed")
def test_ingest_benchmark_writes_its_figures(tmp_path: Path) -> None:
    """An aggregator receives every submission of the load, and the discarding subscriber every message."""
    file = tmp_path / "figures.json"
    arguments = ["--devices", "2", "--submissions", "2", "--megabytes", "0.2", "--repetitions", "1"]
    result = CliRunner().invoke(ingest, [*arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text())["figures"]
    assert all(value > 0 for name, value in figures.items() if name != "aggregator_cpu_ms")  # in 10 ms
    assert figures["ratio_lowest"] <= figures["ratio"] <= figures["ratio_highest"]
    assert figures["megabytes"] == pytest.approx(0.8, rel=0.05)
    assert all(name in result.output for name in figures)
