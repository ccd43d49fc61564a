"""One target in libFuzzer: `python -m tests.fuzz.engine TARGET PROGRAM [libFuzzer's options and folders]`.

PROGRAM is a file that runs this command, which libFuzzer calls when it merges. Only this module needs atheris.
A finding ends the process, and its input is written to a file.
"""

import logging
import sys
from random import Random
from zlib import crc32

import atheris

with atheris.instrument_imports(
    include=["protocol", "edge_client", "aggregator", "sums_operator", "tests.fuzz"]
):
    from tests.fuzz.targets import PLANTED, TARGETS

from tests.fuzz.target import measure

MEASURED = 32
"""The allocations of one input in 32, by crc32, are measured, which takes five times as long."""


def main() -> None:
    """Fuzz until the runs are done or there is a finding."""
    logging.disable(logging.CRITICAL)
    target = {**TARGETS, **PLANTED}[sys.argv[1]]
    for seed in target.seeds():
        target.one_input(seed)  # so that cached allocations do not count for an input
    change = target.mutate

    def one_input(data: bytes) -> None:
        if crc32(data) % MEASURED:
            target.one_input(data)
        else:
            measure(target, data)

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        random = Random(seed)
        other = data if change is None or not random.randrange(3) else change(data, random)[:max_bytes]
        return bytes(atheris.Mutate(data, max_bytes)) if other == data else other

    atheris.Setup(sys.argv[2:], one_input, custom_mutator=mutate if change is not None else None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
