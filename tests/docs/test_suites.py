"""The page of the tests shows runs of the current suites of faults, injections and attacks."""

import itertools
from pathlib import Path

from tests.system.injection.programs import PROGRAMS
from tests.system.suites import ATTACKS, FAULTS
from tests.system.tables import HEADINGS, FaultRow, InjectionRow, with_total

PAGE = Path(__file__).parents[2] / "tests" / "README.md"


def _rows(kind: str) -> list[list[str]]:
    """Return the cells of the table of this kind, below its heading."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(f"| {' | '.join(HEADINGS[kind])} |") + 2
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def _numbers(cells: list[str]) -> list[int]:
    return [int(cell.replace(",", "")) for cell in cells]


def test_every_fault_has_a_row() -> None:
    """Each fault of the suite once, in its order, then their sum."""
    assert [row[0] for row in _rows("faults")] == [*FAULTS, "all"]


def test_every_injection_is_of_a_run_that_passed() -> None:
    """Each program was run with each fault, and no life lost anything."""
    *rows, total = (InjectionRow(cells[0], cells[1], *_numbers(cells[2:])) for cells in _rows("injections"))
    assert list(dict.fromkeys(row.program for row in rows)) == list(PROGRAMS)
    assert all(row.lives > 0 for row in rows)
    assert total == with_total(rows)[-1]
    assert total.lost == 0


def test_every_row_is_of_a_run_that_passed() -> None:
    """Each fault was provoked as often as its test requires, and nothing was lost or counted twice."""
    *rows, total = (FaultRow(cells[0], *_numbers(cells[1:])) for cells in _rows("faults"))
    faults = list(rows)
    for row in faults:
        assert row.provoked >= FAULTS[row.fault].least, row
        assert (row.once, row.lost, row.twice) == (row.sent, 0, 0), row
    assert total == with_total(faults)[-1]


def test_every_attack_has_a_row() -> None:
    """Each attack of the suite once, in its order, with what stops it and where it is visible."""
    found = [(name, stopped_by, seen) for name, _, _, stopped_by, seen in _rows("attacks")]
    assert found == [(each.name, each.stopped_by, each.visible_in) for each in ATTACKS.values()]


def test_every_attack_is_of_a_run_in_which_none_succeeded() -> None:
    """Each attack was tried, and no attempt succeeded."""
    for name, tried, succeeded, _, _ in _rows("attacks"):
        assert int(tried.replace(",", "")) > 0, name
        assert succeeded == "0", name
