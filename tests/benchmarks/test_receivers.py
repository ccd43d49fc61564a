"""The benchmark of receivers measures the real programs and writes its figures."""

import contextlib
import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.cost.uploads.receivers import RUN, RUN_HERE, command
from tests.support.databases.postgresql import PostgreSQL, needs_postgresql
from tests.support.network.brokers import needs_mosquitto


@needs_postgresql
@needs_mosquitto
def test_receivers_are_compared_with_one_aggregator(tmp_path: Path) -> None:
    """Every submission is accepted in each arrangement."""
    file = tmp_path / "figures.json"
    with contextlib.closing(PostgreSQL()) as server:
        server.start()
        arguments = ["--store", server.url, "--devices", "4", "--submissions", "2", "--repetitions", "1"]
        result = CliRunner().invoke(command, [*arguments, "--receivers", "2", "--json", str(file)])
        assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert list(written["runs"]) == [RUN_HERE, RUN, "2 receivers"]
    assert [each["submissions"] for (each,) in written["runs"].values()] == [8, 8, 8]
