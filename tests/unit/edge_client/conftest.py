"""A device with images, whose head a test installs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.devices.device_bench import HeadBench, stop_all


@pytest.fixture(autouse=True)
def stopped_benches() -> Iterator[None]:
    yield
    stop_all()


@pytest.fixture
def bench(tmp_path: Path) -> HeadBench:
    return HeadBench(tmp_path)
