"""What is fuzzed: a function that takes any bytes, and what it may make of them."""

import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

MIB = 1024**2

Mutate = Callable[[bytes, Random], bytes]
"""Bytes to others that are near them in form."""


class ExcessiveAllocation(Exception):
    """An input made the code under test allocate more than it may."""


@dataclass(frozen=True)
class Target:
    """Something that reads bytes from outside.

    Args:
        name: of the target, and of its folder of inputs.
        one_input: takes any bytes; whatever it raises is a finding.
        seeds: makes inputs to begin with.
        mutate: changes an input in its own terms; bytes are changed blindly as well.
        max_bytes: of an input.
        bytes_per_byte: may be allocated for each byte of the input, at any moment, beside `at_least_bytes`.
        at_least_bytes: may be allocated for an empty input.
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

    def bound_bytes(self, size_bytes: int) -> int:
        """What an input of so many bytes may allocate."""
        return self.at_least_bytes + self.bytes_per_byte * size_bytes


def measure(target: Target, data: bytes) -> int:
    """Give a target an input, and return what it allocates at its peak, in bytes.

    Python's objects are seen, those that msgspec makes in C included, and numpy's arrays; also what is allocated and
    never touched.

    Raises:
        ExcessiveAllocation: it is more than the target may.
    """
    tracemalloc.start()
    try:
        target.one_input(data)
        _, used = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if used > target.bound_bytes(len(data)):
        raise ExcessiveAllocation(
            f"{target.name}: {len(data)} bytes made it allocate {used}, and it may {target.bound_bytes(len(data))}"
        )
    return used
