"""The clock of all deadlines: elapsed time, which no change of the wall clock moves, and which restarts continue."""

import time
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec

from protocol.storage.facts import Facts

KEEP_S = 60.0
"""Seconds between stored readings: what a reboot costs the clock at most, beside the time without power."""

MachineTime = Callable[[], tuple[str, float]]
"""Returns an identifier of the machine's boot, and the seconds since then, which are never set back."""


class ClockReading(msgspec.Struct, frozen=True):
    """The elapsed time at a moment of the machine's own clock."""

    elapsed_s: float
    boot: str
    boot_s: float


@cache
def _boot() -> str:
    """Return the identifier of this boot; where there is none, of this process."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return uuid.uuid4().hex


def machine_time() -> tuple[str, float]:
    """Return the boot and the seconds since then, also those in which the machine was suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return _boot(), time.clock_gettime(clock)


class ElapsedClock:
    """Seconds since the state directory was created, without those in which the machine was off.

    Between two starts on the same boot of a machine the time is exact. All programs on a state directory agree on it.

    Args:
        facts: where the reading is stored.
        read_only: store nothing.
        machine: the machine's own clock.
    """

    def __init__(self, facts: Facts, *, read_only: bool = False, machine: MachineTime = machine_time) -> None:
        self._facts = facts
        self._machine = machine
        boot, boot_s = machine()
        stored = facts.get(ClockReading)
        self._reading = stored or ClockReading(0.0, boot, boot_s)
        if self._reading.boot != boot:
            self._reading = ClockReading(self._reading.elapsed_s, boot, boot_s)
        self._kept_s = self._reading.elapsed_s
        if self._reading != stored and not read_only:
            facts.put(self._reading)

    def now_s(self) -> float:
        """Return the elapsed time; it never decreases while a program runs."""
        _, boot_s = self._machine()
        return self._reading.elapsed_s + max(0.0, boot_s - self._reading.boot_s)

    def keep(self) -> None:
        """Store a reading if the last one is KEEP_S old; running programs call it. Raises StateError."""
        now_s = self.now_s()
        if now_s < self._kept_s + KEEP_S:
            return
        self._facts.put(ClockReading(now_s, *self._machine()))
        self._kept_s = now_s

    def unix_s(self, elapsed_s: float) -> float:
        """Return an elapsed time as a time of the wall clock, in unix seconds, for people."""
        return time.time() + elapsed_s - self.now_s()
