import sys

import pytest

from benchmarks.device.measurement import in_turns, median, ratio, run
from protocol.errors import ProtofleetError

needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's record of a process is read as on Linux"
)


@needs_linux
def test_programs_run_in_turns_and_their_first_run_does_not_count() -> None:
    order: list[str] = []

    def program(name: str, text: str) -> list[str]:
        order.append(name)
        return ["-c", text]

    runs = in_turns(
        {"small": lambda: program("small", "pass"), "large": lambda: program("large", "x = b'x' * 10**8")},
        repetitions=2,
    )

    assert order == ["small", "large"] * 3
    assert [len(each) for each in runs.values()] == [2, 2]
    assert median(runs["large"], "memory_bytes") - median(runs["small"], "memory_bytes") > 0.9e8
    assert ratio(runs["large"], runs["small"], "memory_bytes") > 2


@needs_linux
def test_a_program_that_fails_is_reported_with_its_last_lines() -> None:
    with pytest.raises(ProtofleetError, match="no such backbone"):
        run(["-c", "raise SystemExit('no such backbone')"])
