"""Adds blocks as tasks of a Ray cluster, whose workers read the submissions themselves, and their sums in a tree.

Importing this imports Ray.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from aggregator.algorithms.statistics.moments import Moments, add
from aggregator.training.statistics_sums import Block, Figures, Work
from protocol import __version__
from protocol.cli import require_packages
from protocol.errors import ProtofleetError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
require_packages("ray", extras="ray")
import ray  # noqa: E402 - reports its use unless the variable is set before
from ray.exceptions import RayError, RayTaskError  # noqa: E402

FAN_IN = 8
"""Sums that a task of the tree adds."""

AHEAD = 2
"""Blocks in progress for each processor: that bounds the memory of sums that are not added yet."""


@contextlib.contextmanager
def ray_engine() -> Iterator["RayEngine"]:
    """Yield an engine on the cluster at RAY_ADDRESS, else on one of this machine that ends with the block.

    A program that is connected to a cluster already stays so.

    Raises:
        ProtofleetError: there is no cluster, or it has failed.
    """
    with _connected():
        yield RayEngine(processors=max(1, int(ray.cluster_resources().get("CPU", 1))))


class RayEngine:
    """Adds each block on a worker. A task whose worker or machine ends is repeated by Ray, up to three times."""

    def __init__(self, *, processors: int) -> None:
        self._ahead = AHEAD * processors
        self._add = ray.remote(num_returns=2)(_added)
        self._combine = ray.remote(_combined)

    def sum(
        self,
        work: Work[Figures],
        blocks: Iterable[Block],
        total: Moments,
        keep: Callable[[Block, Figures], None],
    ) -> Moments:
        running: collections.deque[tuple[Block, Any, Any]] = collections.deque()
        levels: list[list[Any]] = []

        def take() -> None:
            block, moments, figures = running.popleft()
            keep(block, ray.get(figures))
            self._insert(levels, moments)

        for block in blocks:
            running.append((block, *self._add.remote(work, block.alone(), __version__)))
            if len(running) >= self._ahead:
                take()
        while running:
            take()
        rest = [moments for level in reversed(levels) for moments in level]
        return add(total, ray.get(self._combine.remote(*rest))) if rest else total

    def _insert(self, levels: list[list[Any]], moments: Any) -> None:
        """Insert a sum as a leaf of the tree; a full node of FAN_IN sums becomes one of the next level."""
        for level in levels:
            level.append(moments)
            if len(level) < FAN_IN:
                return
            moments = self._combine.remote(*level)
            level.clear()
        levels.append([moments])


def _added(work: Work[Figures], block: Block, version: str) -> tuple[Moments, Figures]:
    if version != __version__:
        raise ProtofleetError(f"a Ray worker has protofleet {__version__}, and the aggregator {version}")
    return work(block, block.nothing())


def _combined(first: Moments, *others: Moments) -> Moments:
    # Ray's arrays are read-only.
    total = dataclasses.replace(
        first,
        sums=first.sums.copy(),
        second_moment=first.second_moment.copy(),
        class_sums=first.class_sums.copy(),
    )
    for each in others:
        total = add(total, each)
    return total


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    with contextlib.ExitStack() as cleanup:
        try:
            if not ray.is_initialized():
                _connect(cleanup)
            yield
        except RayTaskError as error:
            if isinstance(error.cause, ProtofleetError):
                raise error.cause from None
            raise ProtofleetError(f"Ray: {_last_line(error)}") from error
        except RayError as error:
            raise ProtofleetError(f"Ray: {_last_line(error)}") from error


def _connect(cleanup: contextlib.ExitStack) -> None:
    address, options = os.environ.get("RAY_ADDRESS"), dict[str, Any]()
    if not address:
        folder = cleanup.enter_context(
            tempfile.TemporaryDirectory(prefix="protofleet-", ignore_cleanup_errors=True)
        )
        options = {"include_dashboard": False, "_temp_dir": folder}
    cleanup.callback(ray.shutdown)
    try:
        ray.init(address or "local", logging_level=logging.ERROR, log_to_driver=False, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = (
            f"the Ray cluster at RAY_ADDRESS {address} cannot be used" if address else "Ray does not start"
        )
        raise ProtofleetError(f"{where}: {_last_line(error)}") from error


def _last_line(error: BaseException) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), repr(error))
