"""The page of the tests shows a run of the current attack suite."""

from pathlib import Path

from tests.system.suites import ATTACKS
from tests.system.tables import HEADINGS

PAGE = Path(__file__).parents[2] / "tests" / "README.md"


def _rows() -> list[list[str]]:
    """Return the table of the section on attacks."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## Attacks that were tried\n")
    section = section.partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_attack_has_a_row() -> None:
    """Each attack of the suite once, in its order, with what stops it and where it is visible."""
    heading, _, *rows = _rows()
    assert tuple(heading) == HEADINGS["attacks"]
    found = [(name, stopped_by, seen) for name, _, _, stopped_by, seen in rows]
    assert found == [(each.name, each.stopped_by, each.visible_in) for each in ATTACKS.values()]


def test_every_row_is_of_a_run_in_which_nothing_succeeded() -> None:
    """Each attack was tried, and no attempt succeeded."""
    for name, tried, succeeded, _, _ in _rows()[2:]:
        assert int(tried.replace(",", "")) > 0, name
        assert succeeded == "0", name
