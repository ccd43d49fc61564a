"""What an attack of the suite is: what is tried on a fleet, what stops it, and where an operator sees it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.system.attacks.ground import Ground

Try = Callable[[Ground], Iterator[bool]]
"""Does its worst to a fleet, and says of each attempt whether it has succeeded."""

Seen = tuple[str, str]
"""What `aggregator status` counts: the reason, and under whose name, or `by NAME` where a device has not believed."""


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        name: as in the table.
        stopped_by: what does, each behind the one before.
        seen: what has been counted when it is over.
        but: how it shows otherwise, where nothing is counted.
    """

    name: str
    attempt: Try
    stopped_by: str
    seen: tuple[Seen, ...]
    but: str

    @property
    def shown(self) -> str:
        """Where an operator sees it, in words."""
        said = [f"`{reason}` {who if who.startswith('by ') else f'from {who}'}" for reason, who in self.seen]
        return ", ".join(said) or self.but


def attack(
    name: str, *, stopped_by: str, seen: tuple[Seen, ...] = (), but: str = ""
) -> Callable[[Try], Attack]:
    """Make an attack of a function."""
    return lambda attempt: Attack(name, attempt, stopped_by, seen, but)
