"""The sizes of the source code and of pages, beside their budgets in `pyproject.toml`: `python -m tests.budget`."""

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

RAISE = "make it smaller, or raise the budget in pyproject.toml with a line in CHANGELOG.md that says what a user gets"


def statements(text: str) -> int:
    """Return the number of statements of a program, without docstrings and imports."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return sum(
        not _is_docstring(node) and not isinstance(node, ast.Import | ast.ImportFrom) for node in nodes
    )


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def measured(room: Path) -> dict[str, int]:
    """Return a room's lines, statements and files, and the files of its largest folder."""
    files = sorted(room.rglob("*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    return {
        "lines": sum(text.count("\n") for text in texts),
        "statements": sum(map(statements, texts)),
        "files": len(files),
        "files_in_a_folder": max(Counter(file.parent for file in files).values()),
    }


def problems(root: Path = ROOT) -> Iterator[str]:
    """Yield what is over its budget: rooms by their code, pages of the site by their words."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["protofleet"]
    pages = {page.relative_to(root / "docs").as_posix(): page for page in root.glob("docs/**/*.md")}
    for name, page in pages.items():
        words = len(page.read_text(encoding="utf-8").split())
        if not name.startswith("adr/") and words > (most := settings["words"].get(name, 0)):
            yield f"docs/{name}: {words} words, budget {most}: shorten it, or raise the budget in pyproject.toml"
    for room, limits in settings["budget"].items():
        sizes = measured(root / room)
        for unit, most in limits.items():
            if sizes[unit] > most:
                yield f"{room}: {sizes[unit]} {unit.replace('_', ' ')}, budget {most}: {RAISE}"


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or None)
