"""Code and pages use the project's vocabulary (ADR 0020)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "protocol",
    "edge_client",
    "aggregator",
    "export",
    "tests",
    "benchmarks",
    "research",
    "examples",
    "docs",
)
REPLACED = {
    r"pictures?": "image",
    r"(no|some|every|any)body|whoever": "client, operator, attacker, device",
    r"hand(s|ed)? in|handing in": "upload",
    r"set(s)? aside|readmit(s|ted)?": "quarantine, release",
    r"enrol(s|ment)?": "enroll, enrollment",
    r"let(s)? in|disbelieved?": "authenticate, untrusted",
    r"learnt|untaught|taught": "trained, local model, initial model",
    r"hang(s)? on": "depends on",
}
"""Words of earlier versions, and the standard terms for them."""


def source_files() -> list[Path]:
    """Return all source files but this one, which lists the words."""
    found = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    return [file for file in found if file != Path(__file__)]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]


def test_replaced_words_do_not_return() -> None:
    """No source file and no page has a word that the vocabulary replaces."""
    words = re.compile(rf"\b({'|'.join(f'(?:{word})' for word in REPLACED)})\b", re.IGNORECASE)
    found = [
        f"{file.relative_to(ROOT)}:{number}: {match[0]}"
        for file in (*source_files(), *pages())
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        for match in words.finditer(line)
    ]
    assert not found, "\n".join(found)


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield every docstring, those of constants and fields included."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value


def test_docstrings_state_what_is_returned_or_done() -> None:
    """None begins with an indirect question."""
    found = [
        f"{file.relative_to(ROOT)}: {text.splitlines()[0]}"
        for file in source_files()
        for text in docstrings(ast.parse(file.read_text(encoding="utf-8")))
        if re.match(r"(Who|What|Whether)\b", text)
    ]
    assert not found, "\n".join(found)
