"""What a run of the suite comes to: a row an attack."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

HEADINGS = ("attack", "tried", "succeeded", "stopped by", "where an operator sees it")


@dataclass(frozen=True)
class Row:
    """One attack: how often it was tried, how often it has succeeded, what stops it and where it shows."""

    attack: str
    tried: int
    succeeded: int
    stopped_by: str
    seen: str


def markdown(rows: Iterable[Row]) -> str:
    """The rows as a table."""
    cells = [
        HEADINGS,
        *(tuple(f"{cell:,}" if isinstance(cell, int) else cell for cell in astuple(row)) for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| "
        + " | ".join(
            cell.rjust(width) if at in (1, 2) else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in cells
    ]
    rule = (
        "|"
        + "|".join("-" * (width + 1) + (":" if at in (1, 2) else "-") for at, width in enumerate(widths))
        + "|"
    )
    return "\n".join([lines[0], rule, *lines[1:]])
