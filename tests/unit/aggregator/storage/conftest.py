"""Stores on both databases."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A new state directory, once for each database."""
    if request.param == "sqlite":
        yield open_store(tmp_path)
        return
    server = request.getfixturevalue("postgresql")
    opened = open_store(tmp_path, database=server.url, fleet=tmp_path.name)
    with contextlib.closing(opened):
        yield opened
