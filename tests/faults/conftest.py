"""A fleet for each test, what it has to come to, and the table at the end."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.brokers import free_address, mosquitto_program
from tests.faults.broker import Mosquitto
from tests.faults.fleet import DEVICES, Fleet, Reference, write_world
from tests.faults.table import Row, markdown

OUT = "PROTOFLEET_FAULTS_OUT"
"""Environment variable that names a file: the table is written to it as JSON, and as Markdown beside it."""

SEED = 20261121

MakeFleet = Callable[..., AbstractContextManager[Fleet]]
Keep = Callable[[Row], None]

_ROWS = pytest.StashKey[list[Row]]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin with an empty table."""
    config.stash[_ROWS] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table, and write it where the environment says."""
    rows = config.stash[_ROWS]
    if not rows:
        return
    terminalreporter.section("faults")
    terminalreporter.write_line(markdown(rows))
    if out := os.environ.get(OUT):
        Path(out).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        Path(out).with_suffix(".md").write_text(markdown(rows) + "\n")


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line of progress, whatever pytest captures."""
    manager = request.config.pluginmanager.getplugin("capturemanager")
    started_s = time.monotonic()

    def say(text: str) -> None:
        with manager.global_and_fixture_disabled():
            print(f"\n    {time.monotonic() - started_s:5.1f} s  {text}", end="", flush=True)  # noqa: T201

    return say


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task and pictures; skips where there is no mosquitto."""
    if mosquitto_program() is None:
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    return folder


@pytest.fixture(scope="session")
def reference(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What the fleet comes to when nothing happens to it."""
    root = tmp_path_factory.mktemp("reference")
    broker = Mosquitto(free_address(), root)
    with Fleet(root, world, broker, lambda _: None, SEED) as fleet:
        fleet.start()
        fleet.settle()
        summary = fleet.status()
        prototypes = {device["device"]: device["prototypes"] for device in summary["devices"]}
        assert list(prototypes) == list(DEVICES)
        return Reference(summary["heads"][0]["sha256"], prototypes)


@pytest.fixture
def fleet_of(world: Path, tmp_path: Path, say: Callable[[str], None]) -> MakeFleet:
    """Make a fleet, taken down at the end; `options` are lines of the broker's configuration."""

    @contextmanager
    def make(*, options: str = "", without_mqtt5: bool = False) -> Iterator[Fleet]:
        broker = Mosquitto(free_address(), tmp_path, options=options)
        with Fleet(tmp_path, world, broker, say, SEED, without_mqtt5=without_mqtt5) as fleet:
            yield fleet

    return make


@pytest.fixture
def fleet(fleet_of: MakeFleet) -> Iterator[Fleet]:
    """A fleet behind a broker with nothing special to it; nothing but the broker runs yet."""
    with fleet_of() as fleet:
        yield fleet


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Keep:
    """Put a row into the table."""
    return request.config.stash[_ROWS].append
