"""The tables of a run: a row for each fault and each attack, printed at the end and written to files."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

OUT = {"faults": "PROTOFLEET_FAULTS_OUT", "attacks": "PROTOFLEET_ATTACKS_OUT"}
"""Environment variables that name a file: the table is written to it as JSON, and as Markdown beside it."""

HEADINGS = {
    "faults": ("fault", "provoked", "submissions sent", "counted once", "lost", "counted twice"),
    "attacks": ("attack", "tried", "succeeded", "stopped by", "where an operator sees it"),
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
class Reference:
    """Result of a run without faults."""

    heads: tuple[str, ...]
    """Hex digests, the oldest first."""
    prototypes: Mapping[str, int]
    """Number in each device's submission."""

    @property
    def head(self) -> str:
        return self.heads[0]


def with_total(rows: Iterable[FaultRow]) -> list[FaultRow]:
    """Return the rows, and below them the sum of each column."""
    rows = list(rows)
    sums = (sum(column) for column in zip(*(astuple(row)[1:] for row in rows), strict=True))
    return [*rows, FaultRow("all", *sums)]


def markdown(kind: str, rows: Iterable[FaultRow | AttackRow]) -> str:
    """Return the rows as a Markdown table; columns of numbers are aligned to the right."""
    values = [astuple(row) for row in rows]
    rule = ["---:" if isinstance(cell, int) else "---" for cell in values[0]]
    cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in line] for line in values]
    return "\n".join(f"| {' | '.join(line)} |" for line in (HEADINGS[kind], rule, *cells))


def write(kind: str, rows: list[FaultRow] | list[AttackRow], text: str) -> None:
    if out := os.environ.get(OUT[kind]):
        Path(out).with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        Path(out).with_suffix(".md").write_text(text + "\n")
