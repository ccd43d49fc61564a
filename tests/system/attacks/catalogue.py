"""An attack of the suite: the function that attempts it, what stops it, and where an operator sees it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.system.attacks.fleet import AttackedFleet

Attempt = Callable[[AttackedFleet], Iterator[bool]]
"""Attacks a fleet; yields for each attempt whether it has succeeded."""

Count = tuple[str, str]
"""A reason and the sender's name, or `by NAME` for messages that device NAME has refused. Reasons in `BROKER_LOG` are
counted in the broker's log, all others in `aggregator status`."""

BROKER_LOG = {"denied": "`Denied PUBLISH`", "no certificate": "`SSL routines`"}
"""Texts in the broker's log."""


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        name: as in the table.
        stopped_by: in order.
        counted: what has increased when it is over.
        otherwise: where an operator sees it if nothing is counted.
    """

    name: str
    attempt: Attempt
    stopped_by: str
    counted: tuple[Count, ...]
    otherwise: str

    @property
    def visible_in(self) -> str:
        """Return where an operator sees it, in words."""
        places = [
            f"broker's log, {BROKER_LOG[reason]}{'' if name == '?' else f' from {name}'}"
            if reason in BROKER_LOG
            else f"`{reason}` {name if name.startswith('by ') else f'from {name}'}"
            for reason, name in self.counted
        ]
        return ", ".join(places) or self.otherwise


def attack(
    name: str, *, stopped_by: str, counted: tuple[Count, ...] = (), otherwise: str = ""
) -> Callable[[Attempt], Attack]:
    """Make an attack of a function."""
    return lambda attempt: Attack(name, attempt, stopped_by, counted, otherwise)
