"""A device's state and a device in rounds, for every test here."""

from pathlib import Path

import pytest

from edge_client.storage.device_state import DeviceState
from tests.support.devices.device_bench import RoundsBench


@pytest.fixture
def store(tmp_path: Path) -> DeviceState:
    return DeviceState(tmp_path / "state")


@pytest.fixture
def rounds(tmp_path: Path) -> RoundsBench:
    return RoundsBench(tmp_path)
