"""Snapshots of a state in PostgreSQL."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aggregator.http import snapshots
from aggregator.http.snapshots import Snapshots
from aggregator.storage.open_store import open_store
from aggregator.storage.stored_values import SigningKey
from tests.support.databases.postgresql import PostgreSQL
from tests.support.messages.submissions import SERVED


def test_state_in_postgresql_is_read_again_only_when_it_has_changed(
    tmp_path: Path, postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another program; the start and the end of the aggregator are changes, too."""
    monkeypatch.setattr(snapshots, "POLL_S", 0)
    monkeypatch.setattr(snapshots, "REST", 0)

    async def compare() -> None:
        read = Snapshots(tmp_path)
        with contextlib.closing(
            open_store(tmp_path, database=postgresql.url, fleet=tmp_path.name, lock=True)
        ) as store:
            store.facts.put(SERVED)
            first = await read.current()
            assert first.status is not None
            assert first.status.running
            assert await read.current() is first
            store.facts.put(SigningKey("00"))
            second = await read.current()
            assert second.status is not None
            assert second.status.aggregator_key == "00"
            assert await read.current() is second
        # PostgreSQL releases the lock of the closed connection when it notices the end, some milliseconds later.
        while (third := await read.current()).status is None or third.status.running:
            pass
        await read.end()

    with ThreadPoolExecutor(1) as pool:  # a browser's tests leave a running event loop in this thread
        pool.submit(asyncio.run, compare()).result()
