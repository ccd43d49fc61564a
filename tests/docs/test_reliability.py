"""The reliability page shows a run of the current fault suite."""

from pathlib import Path

from tests.system.suites import FAULTS
from tests.system.tables import HEADINGS, FaultRow, with_total

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def _rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_fault_has_a_row() -> None:
    """Each fault of the suite once, in its order, then their sum."""
    heading, _, *rows = _rows()
    assert tuple(heading) == HEADINGS["faults"]
    assert [row[0] for row in rows] == [*FAULTS, "all"]


def test_every_row_is_of_a_run_that_passed() -> None:
    """Each fault was provoked as often as its test requires, and nothing was lost or counted twice."""
    *rows, total = (
        FaultRow(cells[0], *(int(cell.replace(",", "")) for cell in cells[1:])) for cells in _rows()[2:]
    )
    faults = list(rows)
    for row in faults:
        assert row.provoked >= FAULTS[row.fault].least, row
        assert (row.once, row.lost, row.twice) == (row.sent, 0, 0), row
    assert total == with_total(faults)[-1]
