"""Fixtures of what lies past one machine: a PostgreSQL server, and a store on it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from tests.support.databases.postgresql import PostgreSQL


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A running server."""
    pytest.importorskip("psycopg")
    server = PostgreSQL()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def database_url(postgresql: PostgreSQL) -> str:
    return postgresql.url


@pytest.fixture
def store(tmp_path: Path, database_url: str) -> Iterator[Store]:
    """A new state directory with tables in PostgreSQL."""
    with contextlib.closing(open_store(tmp_path, database=database_url, fleet=tmp_path.name)) as opened:
        yield opened
