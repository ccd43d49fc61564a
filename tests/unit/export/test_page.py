"""docs/export.md agrees with the code."""

import re
from pathlib import Path

from protocol.models.onnx_metadata import BackboneMetadata

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
CODE = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "export").glob("*.py"))


def first_cells(title: str) -> list[str]:
    """The first column of the table under a heading, without the table's own heading."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")][2:]


def test_every_metadata_field_is_documented() -> None:
    written = re.findall(r"`(\w+)`", " ".join(first_cells("What the file is")))
    assert sorted(written) == sorted(("kind", *BackboneMetadata.__struct_fields__))


def test_documented_errors_exist() -> None:
    messages = first_cells("Errors")
    assert messages
    for message in messages:
        for fragment in filter(None, map(str.strip, message.split("…"))):
            assert fragment in CODE, message
