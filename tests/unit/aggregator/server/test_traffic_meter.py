"""The bytes that are received and sent, over restarts."""

import contextlib
from pathlib import Path

from aggregator.server.message_intake import TrafficMeter
from aggregator.storage.open_store import open_store
from aggregator.storage.stored_values import Traffic


def test_bytes_of_earlier_starts_are_counted(tmp_path: Path) -> None:
    """Stored every few seconds and at the end."""
    for start in range(1, 3):
        with contextlib.closing(open_store(tmp_path)) as store:
            meter = TrafficMeter(store)
            meter.keep(sent=0)
            meter.received = 100
            meter.keep(sent=10)
            assert (store.facts.get(Traffic) or Traffic()) == Traffic(100 * (start - 1), 10 * (start - 1))
            meter.keep(sent=10, at_once=True)
            assert store.facts.get(Traffic) == Traffic(100 * start, 10 * start)
