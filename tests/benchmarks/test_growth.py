"""Costs of larger fleets are calculated from measured ones."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import cli
from benchmarks.cost.engines.growth import fitted


def test_line_is_found_and_no_part_is_negative() -> None:
    model = fitted("a cost", "s", {n: 3 + 0.5 * n for n in (10, 100, 1000)})
    assert (model.fixed, model.each) == pytest.approx((3, 0.5))
    assert model.residual < 1e-9
    assert model.at(1_000_000) == pytest.approx(500_003)
    falling = fitted("a cost", "s", {10: 2.0, 100: 1.0})
    assert falling.each == 0
    assert falling.residual == pytest.approx(0.4)


def test_stored_results_are_extrapolated(tmp_path: Path) -> None:
    def cost(number: int) -> dict[str, float]:
        return {"wall_s": 1.0, "cpu_s": 1 + number / 100, "memory_bytes": 1e8 + number}

    sizes = (100, 1000)
    heads = [
        {"prototypes": 100 * n, "engine": engine, "cost": cost(n)}
        for engine in ("local", "ray, 2 workers")
        for n in sizes
    ]
    runs = {
        "engines": [{"devices": n, "local": [cost(n)], "ray": [cost(n)]} for n in sizes],
        "engines-fedtc": heads,
        "fleet": [{"devices": n, "upload_s": n / 50, "cpu_s": n / 100, "peak_bytes": 1e8 + n} for n in sizes],
    }
    arguments = ["growth", "--results", str(tmp_path), "--json", str(tmp_path / "growth.json")]
    refused = CliRunner().invoke(cli, arguments)
    assert "no results of engines, engines-fedtc, fleet" in str(refused.exception)
    for name, each in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"runs": each}))
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    table = json.loads((tmp_path / "growth.json").read_text())["tables"][1]
    rows = {row[0]: row[2:] for row in table["rows"]}
    assert rows["uploads, one receiver"] == ["200", "2,000", "20,000"]
    assert rows["fedtc, ray, 2 workers"] == ["101", "1,001", "10,001"]
