"""The benchmark of the device program writes its figures."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.cost.device import device
from tests.support.graphs.backbones import tiny_backbone

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from /proc, which only Linux has"
)


def test_device_benchmark_writes_its_figures(tmp_path: Path) -> None:
    (tmp_path / "backbone.onnx").write_bytes(tiny_backbone())
    arguments = [
        "--backbone",
        str(tmp_path / "backbone.onnx"),
        *["--images", "20", "40", "--repetitions", "1"],
    ]
    result = CliRunner().invoke(device, [*arguments, "--json", str(tmp_path / "figures.json")])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert all(value > 0 for value in figures.values())
    assert {"memory_ratio", "speed_ratio"} <= set(figures)
    assert all(name in result.output for name in figures)
