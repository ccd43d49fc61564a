"""One target in libFuzzer: `python -m tests.fuzz.engine TARGET PROGRAM [libFuzzer's options and folders]`.

PROGRAM is a file that runs just this: libFuzzer calls it when it merges.
Only here is atheris needed. A finding ends the process, and its input is left in a file.
"""

import logging
import sys
from random import Random
from zlib import crc32

import atheris

with atheris.instrument_imports(include=["protocol", "edge_client", "aggregator", "tests.fuzz"]):
    from tests.fuzz.planted import PLANTED
    from tests.fuzz.targets import TARGETS

from tests.fuzz.target import Target, measure

MEASURED = 32
"""One input in so many has its allocations measured, which takes five times as long; which ones, says their crc32."""


def take(target: Target, data: bytes) -> None:
    """Give a target an input."""
    if crc32(data) % MEASURED:
        target.one_input(data)
    else:
        measure(target, data)


def main() -> None:
    """Fuzz until the runs are done or something is found."""
    logging.disable(logging.CRITICAL)  # what is refused is told, and a million times
    target = {**TARGETS, **PLANTED}[sys.argv[1]]
    for seed in target.seeds():
        target.one_input(seed)  # what is made once and kept counts for no input
    change = target.mutate

    def one_input(data: bytes) -> None:
        take(target, data)

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        random = Random(seed)
        other = data if change is None or not random.randrange(3) else change(data, random)[:max_bytes]
        return bytes(atheris.Mutate(data, max_bytes)) if other == data else other

    atheris.Setup(sys.argv[2:], one_input, custom_mutator=mutate if change is not None else None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
