"""Observation of running programs: processor time, memory, and the aggregator's state."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from protocol.errors import StateError


@dataclass(frozen=True)
class Usage:
    """Processor time and memory of a process until now."""

    cpu_s: float
    workers_cpu_s: float
    """Of the processes that it has waited for."""
    memory_bytes: int


def usage(process: int) -> Usage:
    """Return the usage of a process by its id."""
    observed = psutil.Process(process)
    times = observed.cpu_times()
    return Usage(
        times.user + times.system, times.children_user + times.children_system, observed.memory_info().rss
    )


def submitted(state: Path) -> int:
    """Return how many devices' submissions the aggregator has stored."""
    return _read(state, lambda store: len(store.entries(store.served_task().digest)))


def online(state: Path) -> int:
    """Return how many devices are online by the aggregator's record."""
    return _read(state, lambda store: len(store.devices.online()))


def evaluated(state: Path) -> int:
    """Return how many devices' evaluations of the first head the aggregator has."""
    return _read(state, lambda store: len(store.evaluations.devices(store.served_task().digest, 1)))


def _read(state: Path, read: Callable[[Store], int]) -> int:
    """Read something from the state of a running aggregator; 0 while there is none."""
    try:
        store = open_store(state, read_only=True)
    except StateError:
        return 0
    try:
        return read(store)
    finally:
        store.close()
