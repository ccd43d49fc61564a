"""A fault of the suite: the function that provokes it, and how often it has to happen."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.system.faults.fleet import FaultyFleet

Provoke = Callable[[FaultyFleet], int]
"""Starts a fleet of which only the broker runs, provokes a fault, and returns how often."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: as in the table.
        least: how often it has to be provoked. Where a moment has to be met, this is less than the number of attempts:
            on a slow machine the transfer or training may already be over.
        options: lines of the broker's configuration; `{folder}` is its folder.
        without_mqtt5: the broker does not speak MQTT 5.
    """

    name: str
    provoke: Provoke
    least: int
    options: str
    without_mqtt5: bool


def fault(
    name: str, *, least: int, options: str = "max_queued_messages 20000", without_mqtt5: bool = False
) -> Callable[[Provoke], Fault]:
    """Make a fault of a function."""
    return lambda provoke: Fault(name, provoke, least, options, without_mqtt5)
