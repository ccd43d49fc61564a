"""The source code stays within the budget of `pyproject.toml`."""

from pathlib import Path

from tests.budget import measured, problems, statements

PROGRAM = '''"""A docstring."""

import os


def work() -> int:
    """Another one."""
    size = len(os.sep)
    return size
'''


def test_every_room_is_within_its_budget() -> None:
    assert list(problems()) == []


def test_statements_are_counted_without_docstrings_and_imports() -> None:
    """Neither fewer docstrings nor denser lines change the number."""
    assert statements(PROGRAM) == 3


def test_a_room_over_its_budget_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "work.py").write_text(PROGRAM)
    assert measured(tmp_path / "room") == {"lines": 9, "statements": 3, "files": 1, "files_in_a_folder": 1}
    table = "[tool.protofleet.budget]\nroom = {lines = 9, statements = 2}\n"
    (tmp_path / "pyproject.toml").write_text(table)
    (problem,) = problems(tmp_path)
    assert problem.startswith("room: 3 statements, budget 2: make it smaller, or raise the budget")


def test_a_page_over_its_budget_is_named(tmp_path: Path) -> None:
    """A new page needs a budget."""
    (tmp_path / "docs" / "adr").mkdir(parents=True)
    for name in ("short.md", "long.md", "new.md", "adr/0001-a.md"):
        (tmp_path / "docs" / name).write_text("two words")
    table = '[tool.protofleet.budget]\n[tool.protofleet.words]\n"short.md" = 2\n"long.md" = 1\n'
    (tmp_path / "pyproject.toml").write_text(table)
    assert sorted(each.partition(": ")[0] for each in problems(tmp_path)) == ["docs/long.md", "docs/new.md"]
