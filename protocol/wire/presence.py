"""Which of two programs with the same key continues: the one that started later. No I/O, no clock, no randomness.

A copied state folder has the same key and the same epoch as the original, and clocks may differ. A start is therefore
identified by a random instance as well, and takes an epoch above the one that the broker has retained. The older of two
programs stays out until an operator says otherwise, so that the two never replace each other in turns.
"""

import enum
from dataclasses import dataclass, replace

import msgspec

from protocol.wire.messages import Presence

MAX_CLOCK_SKEW_S = 3600.0
"""Seconds by which another machine's clock may be ahead."""

INSTANCE_BYTES = 16

MAX_EPOCH = 2**62
"""A greater epoch is ignored: nothing could be counted up from it."""


class Duplicate(msgspec.Struct, frozen=True):
    """Another program with this program's key, as stored; without an instance there is none."""

    instance: str = ""
    """The instance of the other program, in hex."""
    epoch: int = 0
    address: str = ""
    """Host name and IP address, as it reports them itself."""
    seen_s: float = 0.0
    """Unix seconds."""
    started_later: bool = False
    """This program stays out."""

    @property
    def where(self) -> str:
        return f"{self.address or 'an unknown address'} (instance {self.instance[:8]})"

    @property
    def summary(self) -> str:
        """Return what to show an operator; empty if there is none."""
        if not self.instance:
            return ""
        consequence = (
            "later: this one stays out until `take-over`" if self.started_later else "earlier: it stays out"
        )
        return f"a program with the same key ran at {self.where}, started {consequence}"


class Reaction(enum.Enum):
    """The reaction to a presence on the program's own topic."""

    NONE = "none"
    PUBLISH = "publish its own presence again"
    REPORT = "publish its own presence again, and report a program that started earlier"
    STAY_OUT = "end, and stay out until an operator decides"
    END = "end: an aggregator with another key was started later for this open fleet"


@dataclass(frozen=True)
class Start:
    """One start of a program; `is_announced` once the broker has delivered its own presence back to it."""

    epoch: int
    instance: bytes
    is_announced: bool = False


def observe(own: Start, seen: Presence) -> tuple[Start, Reaction]:
    """Return this start and the reaction to a presence on its topic, signed with its key.

    A broker delivers the messages of a topic to all subscribers in one order. What arrives before the first own
    presence is from the past: this start goes above it. An `online` that comes later is from a program that runs at
    the same time; `offline` may be the will of an earlier start, which a broker publishes late.
    """
    if seen.instance == own.instance:
        is_outdated = seen.state != "online" or seen.epoch != own.epoch
        return replace(own, is_announced=True), Reaction.PUBLISH if is_outdated else Reaction.NONE
    if seen.epoch > MAX_EPOCH:
        return own, Reaction.PUBLISH
    is_later = (seen.epoch, seen.instance) > (own.epoch, own.instance)
    if is_later:
        if own.is_announced:
            return own, Reaction.STAY_OUT
        return replace(own, epoch=seen.epoch + 1), Reaction.PUBLISH
    if seen.state == "replaced" or (seen.state == "online" and own.is_announced):
        return own, Reaction.REPORT
    return own, Reaction.PUBLISH if own.is_announced else Reaction.NONE


def is_newer(epoch: int, *, own: int, now_s: float) -> bool:
    """Return whether a presence with another key, or none, belongs to a program that started later.

    Only aggregators of open fleets compare those: any client can send them, and of two devices under one name the
    aggregator decides, which knows one key. Epochs are start times in unix seconds. One from the far
    future is ignored: it is retained by the broker, so that an attacker who published it once would shut this program
    out for good.
    """
    return own < epoch <= max(own, now_s) + MAX_CLOCK_SKEW_S
