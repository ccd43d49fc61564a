"""Where simulated devices compute: one after the other in this process, or in shares as tasks of a Ray cluster."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Literal, TypeVar

from aggregator.cluster_modules import ENGINES, cluster_module
from protocol import __version__

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Made = TypeVar("Made")

EngineName = Literal["local", "ray"]

MAX_SHARE = 16
"""Devices in a task, at most."""


class Engine:
    """This process."""

    remote_s = 0.0
    """Processor time of other processes."""

    def map(
        self, function: Callable[[Shared, Item], Made], shared: Shared, items: Iterable[Item], *, count: int
    ) -> Iterator[Made]:
        """Yield what a function makes of what all devices share and of each of `count` items, in their order."""
        del count
        return (function(shared, item) for item in items)

    def processor_s(self) -> float:
        """Return the processor time until now, of which differences count."""
        return time.process_time() + self.remote_s


LOCAL = Engine()


class RayEngine(Engine):
    """A Ray cluster that this process is connected to. Shares wait until a processor is nearly free for them."""

    def map(
        self, function: Callable[[Shared, Item], Made], shared: Shared, items: Iterable[Item], *, count: int
    ) -> Iterator[Made]:
        """Yield the same as in this process."""
        import ray

        processors = max(1, int(ray.cluster_resources().get("CPU", 1)))
        size = max(1, min(MAX_SHARE, count // (2 * processors)))
        task: Any = ray.remote(num_cpus=1)(_run_share)
        reference, waiting, rest = ray.put(shared), deque[Any](), iter(items)
        while share := list(islice(rest, size)):
            if len(waiting) == 2 * processors:
                yield from self._made(waiting.popleft())
            waiting.append(task.remote(function, reference, share, __version__))
        while waiting:
            yield from self._made(waiting.popleft())

    def _made(self, reference: Any) -> list[Any]:
        import ray

        made, seconds = ray.get(reference)
        self.remote_s += seconds
        return list(made)


def _run_share(
    function: Callable[[Any, Any], Any], shared: Any, share: list[Any], version: str
) -> tuple[list[Any], float]:
    """Return what a function makes of a share's items in a Ray worker, and the processor time."""
    cluster_module(ENGINES, "ray").require_version(version)
    started_s = time.process_time()
    return [function(shared, item) for item in share], time.process_time() - started_s


@contextlib.contextmanager
def running(name: EngineName) -> Iterator[Engine]:
    """Start an engine, and stop it after the block.

    Raises:
        RuntimeMissing: Ray is not installed.
        ProtofleetError: there is no Ray cluster at RAY_ADDRESS, or it has failed.
    """
    if name == "local":
        yield LOCAL
        return
    with cluster_module(ENGINES, name).connected():
        yield RayEngine()
