"""The fleet that is attacked, and the table at the end."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.brokers import mosquitto_program
from tests.support.closed_fleet import FLEET
from tests.system.attacks.ground import HONEST, Ground
from tests.system.attacks.images import write_images
from tests.system.attacks.suite import ATTACKS
from tests.system.attacks.table import Row, markdown
from tests.system.fleet.test_fleet import write_task

OUT = "PROTOFLEET_ATTACKS_OUT"
"""Environment variable that names a file: the table is written to it as Markdown, and as JSON beside it."""

ROW = "row of the table of attacks"
"""The property under which a test's report carries what it came to, also from a process of pytest-xdist."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table, and write it where the environment says."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    found = {
        row["attack"]: Row(**row) for report in reports for key, row in report.user_properties if key == ROW
    }
    rows = [found[name] for name in ATTACKS if name in found]
    if not rows:
        return
    terminalreporter.section("attacks")
    terminalreporter.write_line(markdown(rows))
    if out := os.environ.get(OUT):
        Path(out).write_text(markdown(rows) + "\n")
        Path(out).with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A closed fleet whose honest devices use a head; skips where there is no mosquitto."""
    if mosquitto_program() is None:
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    root = tmp_path_factory.mktemp("attacks")
    task = write_task(root, fleet=FLEET, quorum=len(HONEST), retrain_after=1000, deadline_s=100_000)
    with task.open("a") as file:
        file.write('[training]\nepochs = 2\ndevice = "cpu"\n')
    ground = Ground(root, task, write_images(root))
    try:
        ground.start()
        yield ground
    finally:
        ground.stop()
