"""CI runs every test, whichever programs a machine lacks; the source code stays within its budget."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.budget import measured, problems, statements

ROOT = Path(__file__).parents[2]


def run_pytest(*arguments: str, **environment: str) -> str:
    """Return the last line of the output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    output = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, check=False
    )
    return output.stdout.decode().splitlines()[-1]


@pytest.mark.parametrize(("ci", "outcome"), [("", "4 skipped"), ("1", "1 failed, .* 3 errors")])
def test_a_missing_program_fails_in_ci(ci: str, outcome: str) -> None:
    """Elsewhere its tests are skipped."""
    arguments = ("tests/docs/test_monitoring.py", "-k", "promtool_accepts")
    assert re.match(outcome, run_pytest(*arguments, PROTOFLEET_CI=ci, PATH="/nonexistent"))


def test_fast_tests_need_neither_torch_nor_postgresql() -> None:
    """With both hidden, as by `make test-fast`, a file whose tests need torch and a test on PostgreSQL are skipped."""
    files = (
        "aggregator/algorithms/test_registry.py",
        "aggregator/storage/test_store.py",
        "protocol/wire/test_topics.py",
    )
    outcome = run_pytest(*(f"tests/unit/{file}" for file in files), PYTHONPATH=str(ROOT / "tests" / "hidden"))
    assert re.match(r"[0-9]+ passed, [0-9]+ skipped in", outcome)


def test_ci_installs_every_package_that_a_skip_names() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    installed = " ".join(re.findall(r"need \S+ (.*)", script)).split()
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py")]
    needed = {name for text in texts for name in re.findall(r'apt-get install ([a-z-]+)[ a-z]*"', text)}
    assert {"mosquitto", "postgresql"} <= needed <= set(installed)


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
