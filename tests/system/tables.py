"""The tables of a run: a row for each fault and each attack, printed at the end."""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

INJECTED = ("EIO", "ENOSPC", "EINTR", "ENOMEM", "SIGKILL")
"""Errors and signals that are injected into system calls."""

HEADINGS = {
    "faults": ("fault", "provoked", "submissions sent", "counted once", "lost", "counted twice"),
    "attacks": ("attack", "tried", "succeeded", "stopped by", "where an operator sees it"),
    "injections": ("program", "call", "calls", *INJECTED, "lost"),
}


@dataclass(frozen=True)
class FaultRow:
    """One fault: how often it was provoked, and the outcomes of the submissions."""

    fault: str
    provoked: int
    sent: int
    once: int
    lost: int
    twice: int


@dataclass(frozen=True)
class AttackRow:
    """One attack: attempts, successes, what stops it and where an operator sees it."""

    attack: str
    tried: int
    succeeded: int
    stopped_by: str
    seen: str


@dataclass(frozen=True)
class InjectionRow:
    """One system call of a program: calls in its life, lives with each fault, and those that broke the invariant."""

    program: str
    call: str
    calls: int
    eio: int
    enospc: int
    eintr: int
    enomem: int
    sigkill: int
    lost: int

    @property
    def lives(self) -> int:
        return self.eio + self.enospc + self.eintr + self.enomem + self.sigkill


Row = FaultRow | AttackRow | InjectionRow
R = TypeVar("R", FaultRow, InjectionRow)


@dataclass(frozen=True)
class Reference:
    """Result of a run without faults."""

    heads: tuple[str, ...]
    """Hex digests, the oldest first."""
    prototypes: Mapping[str, int]
    """Number in each device's submission."""

    @property
    def head(self) -> str:
        return self.heads[0]


def with_total(rows: Iterable[R]) -> list[R]:
    """Return the rows, and below them, if there are any, the sum of each column of numbers."""
    listed: list[R] = list(rows)
    if not listed:
        return []
    kind: Any = type(listed[0])
    columns = zip(*map(astuple, listed), strict=True)
    sums = [sum(column) if isinstance(column[0], int) else "" for column in columns]
    return [*listed, kind("all", *sums[1:])]


def markdown(kind: str, rows: Iterable[Row]) -> str:
    """Return the rows as a Markdown table; columns of numbers are aligned to the right."""
    values = [astuple(row) for row in rows]
    rule = ["---:" if isinstance(cell, int) else "---" for cell in values[0]]
    cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in line] for line in values]
    return "\n".join(f"| {' | '.join(line)} |" for line in (HEADINGS[kind], rule, *cells))
