"""A device with images, whose head a test installs; a device's state and a device in rounds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_client.graphs.backbone import Backbone
from edge_client.store.device_state import DeviceState
from protocol import children
from tests.support.devices.device_bench import HeadBench, RoundsBench, stop_all
from tests.support.devices.job_threads import JobThread


@pytest.fixture(autouse=True)
def jobs_on_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let jobs run in the tests' process."""
    monkeypatch.setattr(children, "launch", JobThread)
    monkeypatch.setattr(JobThread, "isolate", Backbone.isolated)
    yield
    JobThread.kill_all()


@pytest.fixture(autouse=True)
def stopped_benches() -> Iterator[None]:
    yield
    stop_all()


@pytest.fixture
def bench(tmp_path: Path) -> HeadBench:
    return HeadBench(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> DeviceState:
    return DeviceState(tmp_path / "state")


@pytest.fixture
def rounds(tmp_path: Path) -> RoundsBench:
    return RoundsBench(tmp_path)
