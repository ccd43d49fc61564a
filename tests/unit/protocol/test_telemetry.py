"""ONNX Runtime's telemetry, which is on by default since 1.29, is off in every program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(program: str, home: Path, **variables: str) -> str:
    """Return the output of a program, started without the variables of CI services, which turn telemetry off too."""
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-B", "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("package", ["edge_client", "aggregator", "export"])
def test_onnx_runtime_stores_no_telemetry(package: str, tmp_path: Path) -> None:
    """With telemetry, its import writes an identifier of the device and unsent events to the home folder."""
    run(f"import {package}, onnxruntime; onnxruntime.SessionOptions()", tmp_path)
    assert [str(file) for file in tmp_path.rglob("*")] == []


def test_a_user_can_enable_telemetry(tmp_path: Path) -> None:
    program = "import protocol, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    assert run(program, tmp_path) == "1"
    assert run(program, tmp_path, ORT_DISABLE_TELEMETRY="0") == "0"
