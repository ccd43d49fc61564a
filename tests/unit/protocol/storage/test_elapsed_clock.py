"""Elapsed time over restarts and reboots, whatever the wall clock says."""

import time
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.storage.elapsed_clock import KEEP_S, ElapsedClock, machine_time
from protocol.storage.facts import Fact, Facts


@dataclass
class Machine:
    """A machine's own clock: the number of the boot, and the seconds since then."""

    boots: int = 1
    since_s: float = 500.0

    def __call__(self) -> tuple[str, float]:
        return str(self.boots), self.since_s


class StoredReading(Facts):
    """The values of the database, in memory."""

    def __init__(self) -> None:
        self.stored: dict[type[msgspec.Struct], Any] = {}

    def get(self, kind: type[Fact]) -> Fact | None:
        return self.stored.get(kind)

    def put(self, *facts: msgspec.Struct) -> None:
        self.stored |= {type(fact): fact for fact in facts}


@given(st.lists(st.one_of(st.floats(0, KEEP_S), st.sampled_from(["restart", "reboot", "look"])), max_size=15))
def test_time_passes_once(happenings: list[float | str]) -> None:
    """A restart costs none of it, and a reboot less than a minute; `aggregator status` sees the same time."""
    facts, machine = StoredReading(), Machine()
    clock, expected_s = ElapsedClock(facts, machine=machine), 0.0
    for happening in happenings:
        match happening:
            case float(seconds):
                machine.since_s += seconds
                expected_s += seconds
                clock.keep()
            case "restart":
                clock = ElapsedClock(facts, machine=machine)
            case "reboot":
                machine.boots, machine.since_s = machine.boots + 1, 3.0
                clock = ElapsedClock(facts, machine=machine)
                assert expected_s - KEEP_S - 1e-6 <= clock.now_s() <= expected_s + 1e-6
                expected_s = clock.now_s()
            case _:
                seen = ElapsedClock(facts, read_only=True, machine=machine)
                assert seen.now_s() == pytest.approx(expected_s, abs=1e-6)
        assert clock.now_s() == pytest.approx(expected_s, abs=1e-6)


def test_the_wall_clock_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It only shows people when a deadline is."""
    clock = ElapsedClock(StoredReading(), machine=(machine := Machine()))
    before_s = clock.now_s()
    monkeypatch.setattr(time, "time", lambda: 2e9)
    machine.since_s += 7
    assert clock.now_s() == before_s + 7
    assert clock.unix_s(clock.now_s() + 60) == 2e9 + 60


def test_machine_time_names_the_boot() -> None:
    boot, since_s = machine_time()
    assert (boot, since_s) <= machine_time()
    assert machine_time()[0] == boot
