import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.device import start
from tests.support.network.brokers import needs_mosquitto


@needs_mosquitto
def test_a_started_device_takes_at_most_1_5_times_the_memory_of_its_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = "bare libraries"
    monkeypatch.setattr(
        start, "RIVALS", {bare: start.RIVALS[bare]}
    )  # PyTorch would take a gigabyte of memory
    file = tmp_path / "start.json"

    arguments = ["--repetitions", "1", "--json", str(file)]
    result = CliRunner().invoke(start.command, arguments, catch_exceptions=False)

    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    ours, rival = (report["runs"][name][0] for name in ("edge-client", bare))
    assert 1 < ours["memory_bytes"] / rival["memory_bytes"] <= 1.5
    sizes = report["installed_bytes"]
    assert sizes[bare] < sizes["edge-client"] < sizes["PyTorch and timm"] / 8
