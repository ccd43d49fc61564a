"""Decisions are short, and the index has all of them."""

import re
from pathlib import Path

ADR = Path(__file__).parents[2] / "docs" / "adr"
NEVER_USED = {38, 39}


def test_each_decision_is_short() -> None:
    for page in ADR.glob("0*.md"):
        text = page.read_text(encoding="utf-8")
        title = re.match(rf"# {page.name[:4]}\. (.*)\n", text)
        assert title is not None, page
        assert len(title[1].split()) <= 7, page
        assert len(text.split()) <= 450, page


def test_the_index_has_every_number_once() -> None:
    """A decision without a page has its reason in the index."""
    row = re.compile(r"^\| (?:\[(\d+)\]\((.*)\)|(\d+)) \| (.+?) \| (.*?) ?\|$", re.MULTILINE)
    rows = row.findall((ADR / "README.md").read_text(encoding="utf-8"))
    numbers = [int(linked or plain) for linked, _, plain, _, _ in rows]
    assert numbers == [each for each in range(1, numbers[-1] + 1) if each not in NEVER_USED]
    assert {file for _, file, _, _, _ in rows if file} == {page.name for page in ADR.glob("0*.md")}
    assert all(reason for linked, _, _, _, reason in rows if not linked)


def test_all_decisions_together_can_be_read() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in ADR.glob("*.md")) <= 11_000
