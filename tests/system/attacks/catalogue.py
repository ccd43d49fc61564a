"""An attack of the suite: a function that tries it, what stops it, and where an operator sees it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.system.attacks.fleet import AttackedFleet

Try = Callable[[AttackedFleet], Iterator[bool]]
"""Does its worst to a fleet, and says of each attempt whether it has succeeded."""

Seen = tuple[str, str]
"""A count: the reason, and the sender's name, or `by NAME` for what device NAME has refused. The reasons in
`BROKER_LOG` are counted in the broker's log, all others in `aggregator status`."""

BROKER_LOG = {"denied": "`Denied PUBLISH`", "no certificate": "`SSL routines`"}
"""The words in the broker's log."""


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
        """Return where an operator sees it, in words."""
        said = [
            f"broker's log, {BROKER_LOG[reason]}{'' if who == '?' else f' from {who}'}"
            if reason in BROKER_LOG
            else f"`{reason}` {who if who.startswith('by ') else f'from {who}'}"
            for reason, who in self.seen
        ]
        return ", ".join(said) or self.but


def attack(
    name: str, *, stopped_by: str, seen: tuple[Seen, ...] = (), but: str = ""
) -> Callable[[Try], Attack]:
    """Make an attack of a function."""
    return lambda attempt: Attack(name, attempt, stopped_by, seen, but)
