"""A device with images, whose head a test installs."""

from pathlib import Path

import pytest

from tests.support.devices.worker_benches import HeadBench


@pytest.fixture
def bench(tmp_path: Path) -> HeadBench:
    return HeadBench(tmp_path)
