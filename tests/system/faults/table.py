"""What a run of the suite comes to: a row a fault."""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass

HEADINGS = ("fault", "provoked", "submissions sent", "counted once", "lost", "counted twice")


@dataclass(frozen=True)
class Row:
    """One fault: how often it was provoked, and what became of the submissions."""

    fault: str
    provoked: int
    sent: int
    once: int
    lost: int
    twice: int


@dataclass(frozen=True)
class Reference:
    """What a run without faults comes to."""

    heads: tuple[str, ...]
    """Hex digests, the oldest first."""
    prototypes: Mapping[str, int]
    """Of each device's submission."""

    @property
    def head(self) -> str:
        """The first head."""
        return self.heads[0]


def total_of(rows: Iterable[Row]) -> Row:
    """The sum of each column."""
    return Row("all", *(sum(column) for column in zip(*(astuple(row)[1:] for row in rows), strict=True)))


def markdown(rows: Iterable[Row]) -> str:
    """The rows as a table, with their sum below."""
    rows = list(rows)
    cells = [
        HEADINGS,
        *(
            tuple(f"{cell:,}" if isinstance(cell, int) else cell for cell in astuple(row))
            for row in (*rows, total_of(rows))
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| "
        + " | ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 1) + (":" if at else "-") for at, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
