"""A fuzz target: a function that accepts any bytes, and the limits of its allocations."""

import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

MIB = 1024**2

Mutate = Callable[[bytes, Random], bytes]
"""Changes an input in terms of its format."""


class ExcessiveAllocation(Exception):
    """An input made the code under test allocate more than its limit."""


@dataclass(frozen=True)
class Target:
    """Code that reads bytes from outside.

    Args:
        one_input: accepts any bytes; an exception is a finding.
        seeds: returns the first inputs.
        mutate: changes an input in terms of its format; bytes are changed at random as well.
        max_bytes: of an input.
        bytes_per_byte: peak allocation for each byte of the input, beside `at_least_bytes`.
        share: of all executions.
    """

    name: str
    one_input: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    mutate: Mutate | None = None
    max_bytes: int = 4096
    bytes_per_byte: int = 64
    at_least_bytes: int = MIB
    share: float = field(default=1.0, kw_only=True)


def measure(target: Target, data: bytes) -> int:
    """Return the peak allocation of a target for an input, bytes: Python's objects, msgspec's and numpy's arrays.

    Raises:
        ExcessiveAllocation: it is above the target's limit.
    """
    tracemalloc.start()
    try:
        target.one_input(data)
        _, used = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    limit = target.at_least_bytes + target.bytes_per_byte * len(data)
    if used > limit:
        raise ExcessiveAllocation(
            f"{target.name}: {len(data)} bytes made it allocate {used}, expected at most {limit}"
        )
    return used
