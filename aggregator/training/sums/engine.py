"""Where blocks of devices are added: in this process, or on a Ray cluster."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from aggregator.algorithms.statistics.moments import Moments
from aggregator.training.jobs import StatisticsJob
from aggregator.training.sums.blocks import Block, Figures, Work


class Engine(Protocol):
    """Adds blocks. Moments are integers modulo 2^64: the order and the place of the additions change no bit."""

    def sum(
        self,
        work: Work[Figures],
        blocks: Iterable[Block],
        total: Moments,
        keep: Callable[[Block, Figures], None],
    ) -> Moments:
        """Return the total with all blocks added; `keep` gets each block's figures, in the order of the blocks."""


class LocalEngine:
    """Adds one block after the other to the same total."""

    def sum(
        self,
        work: Work[Figures],
        blocks: Iterable[Block],
        total: Moments,
        keep: Callable[[Block, Figures], None],
    ) -> Moments:
        """Return the total with all blocks added."""
        for block in blocks:
            total, figures = work(block, total)
            keep(block, figures)
            del figures  # before the next block's are made
        return total


@contextlib.contextmanager
def engine_of(job: StatisticsJob) -> Iterator[Engine]:
    """Yield the job's engine.

    Raises:
        ProtofleetError: Ray is not installed, or its cluster cannot be reached.
    """
    if job.engine == "local":
        yield LocalEngine()
        return
    from aggregator.training.sums.ray_engine import ray_engine  # an extra of its own

    with ray_engine() as engine:
        yield engine
