"""An installation without the wheel of the pages says what is missing."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.wire.joining import parse_link
from tests.unit.aggregator.http.servers import serving
from tests.unit.aggregator.status.stores import started_store


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory; programs that are started find a package `dashboard` without the page's files."""
    package = tmp_path / "packages" / "dashboard"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    paths = (str(package.parent), os.environ.get("PYTHONPATH"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    with contextlib.closing(started_store(tmp_path / "state")) as store:
        return store.folder


def test_addresses_of_the_pages_say_what_to_install(state: Path) -> None:
    with serving(state) as (client, _):
        for path in ("/", "/join", "/join/"):
            answer = client.get(path)
            assert answer.status == 200
            assert b"install the wheel protofleet-dashboard" in answer.body


def test_link_is_printed_with_a_warning(state: Path) -> None:
    """A box can join without the page, and the aggregator's machine may have it: it is no error."""
    program = [
        sys.executable,
        "-P",
        "-m",
        "aggregator.cli",
        "enroll",
        "--link",
        "--url",
        "https://fleet.example",
    ]
    for is_first in (True, False):
        done = subprocess.run(
            [*program, "--state", state], capture_output=True, text=True, encoding="utf-8", check=True
        )
        assert parse_link(done.stdout).fleet == "barn"
        assert "the page for phones is not installed here" in done.stderr
        assert ("created the CA of fleet barn" in done.stderr) == is_first
