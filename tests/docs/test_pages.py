"""The pages agree with the code: options, log lines, links, decisions, generated pages, and the website."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from aggregator.cli import cli as aggregator
from docs import (
    generate_architecture,
    generate_cli,
    generate_status_schema,
    generate_task_file,
    generate_wire,
)
from edge_client.cli import cli as edge_client
from protocol.models.onnx_metadata import BackboneMetadata
from tests.docs.command_lines import parse
from tests.system.injection.programs import PROGRAMS
from tests.system.suites import ATTACKS, FAULTS
from tests.system.tables import HEADINGS, FaultRow, InjectionRow, with_total

ROOT = Path(__file__).parents[2]
PAGES_OF_TASKS = {
    page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "operations").glob("*.md")
}
OPERATIONS = "\n".join(PAGES_OF_TASKS.values())
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("examples/**/*.md"),
    *ROOT.glob("benchmarks/reports/*.md"),
    ROOT / "research" / "README.md",
    ROOT / "tests" / "README.md",
]


def rows(text: str) -> list[list[str]]:
    """Return the cells of each row of the tables in a text, without headings."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [row for row in cells if row[0].startswith(("`", "**`"))]


def setting(place: str) -> list[str]:
    """Return the row of a setting in the generated page."""
    path, _, name = place.rpartition(".")
    title = f"\n## `[{path}]`\n" if path else "\n## Top of the file\n"
    section = PAGES_OF_TASKS["task-settings"].partition(title)[2].partition("\n## ")[0]
    (row,) = (row for row in rows(section) if row[0] == f"`{name}`")
    return row


@pytest.mark.parametrize(
    ("mark", "places"),
    [
        ("yes", ["layers", "client.batch_size", "statistics.features", "fedpcl.tau"]),
        ("", ["quorum", "training.seed", "rounds.staleness", "fedpcl.rounds"]),
    ],
)
def test_settings_that_change_the_task_are_marked(mark: str, places: list[str]) -> None:
    assert [setting(place)[-1] for place in places] == [mark] * 4


@pytest.mark.parametrize(("program", "command"), [("edge-client", edge_client), ("aggregator", aggregator)])
def test_every_command_is_explained(program: str, command: click.Group) -> None:
    """The operations pages mention every subcommand."""
    for name in command.commands:
        assert f"`{program} {name}" in OPERATIONS or f"\n{program} {name}" in OPERATIONS


def test_every_help_ends_with_examples_that_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder with the files that they name."""
    for name in ("photos", "photographs", "new-key"):
        (tmp_path / name).mkdir()
    (tmp_path / "backbone.onnx").touch()
    monkeypatch.chdir(tmp_path)
    for program, root in generate_cli.PROGRAMS.items():
        for context in generate_cli.contexts(program, root):
            epilog = context.command.epilog or ""
            lines = epilog.partition("Examples:\n")[2].splitlines()
            assert lines, context.command_path
            for line in lines:
                for part in line.strip().split(" | "):
                    if part.partition(" ")[0] in generate_cli.PROGRAMS:
                        parse(part.partition(" > ")[0])


def test_quoted_log_lines_are_in_the_code() -> None:
    """The troubleshooting page quotes log lines of the code."""
    packages = ("protocol", "edge_client", "aggregator")
    code = "\n".join(
        file.read_text(encoding="utf-8") for package in packages for file in (ROOT / package).rglob("*.py")
    )
    cells = [row[0] for row in rows(PAGES_OF_TASKS["troubleshooting"])]
    lines = [line for cell in cells if cell.startswith("`") for line in re.findall("`([^`]+)`", cell)]
    assert lines
    for line in lines:
        for fragment in filter(None, map(str.strip, line.split("…"))):
            assert fragment in code, line


def first_cells(title: str) -> list[str]:
    """Return the first column of a table on the page of export, without the table's own heading."""
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")][2:]


def test_every_field_of_a_backbones_metadata_is_documented() -> None:
    written = re.findall(r"`(\w+)`", " ".join(first_cells("What the file is")))
    assert sorted(written) == sorted(("kind", *BackboneMetadata.__struct_fields__))


def test_documented_errors_of_export_exist() -> None:
    code = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "export").glob("*.py"))
    messages = first_cells("Errors")
    assert messages
    for message in messages:
        for fragment in filter(None, map(str.strip, message.split("…"))):
            assert fragment in code, message


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_a_target(page: Path) -> None:
    """A link into the repository leads to a file."""
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    "module",
    [generate_status_schema, generate_cli, generate_architecture, generate_wire, generate_task_file],
)
def test_generated_pages_are_up_to_date(module: Any) -> None:
    """Each generated page is what its module would write now."""
    page = module.PAGE.read_text(encoding="utf-8")
    rendered = module.render(page) if module is generate_architecture else module.render()
    assert page == rendered, f"run: python -m {module.__name__}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_on_a_page_is_accepted(page: Path) -> None:
    """The programs accept the commands in console blocks."""
    blocks = re.findall(r"(?ms)^```console\n(.*?)^```", page.read_text(encoding="utf-8"))
    for line in "".join(blocks).splitlines():
        if re.match(r"(\S*/)?(edge-client|aggregator|export-backbone|protofleet) ", line):
            parse(line)


ADR = ROOT / "docs" / "adr"
UNUSED = {38, 39, 45, 46, 62}


def test_the_index_of_decisions_has_every_number_once() -> None:
    """A decision without a page has its reason in the index."""
    row = re.compile(r"^\| (?:\[(\d+)\]\((.*)\)|(\d+)) \| (.+?) \| (.*?) ?\|$", re.MULTILINE)
    rows = row.findall((ADR / "README.md").read_text(encoding="utf-8"))
    numbers = [int(linked or plain) for linked, _, plain, _, _ in rows]
    assert numbers == [each for each in range(1, numbers[-1] + 1) if each not in UNUSED]
    assert {file for _, file, _, _, _ in rows if file} == {page.name for page in ADR.glob("0*.md")}
    assert all(reason for linked, _, _, _, reason in rows if not linked)


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    start = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert "make demo" in start, "README.md is the start page"
    assert 'href="operations/index.html"' in start
    assert (tmp_path / "site" / "source" / "deploy" / "Dockerfile.txt").is_file()
    reference = (tmp_path / "site" / "python-reference.html").read_text(encoding="utf-8")
    assert 'id="protofleet.Model.predict"' in reference


def test_docstrings_state_what_is_returned_or_done() -> None:
    """None begins with an indirect question."""
    folders = (
        "protocol",
        "edge_client",
        "aggregator",
        "export",
        "sums_operator",
        "tests",
        "benchmarks",
        "examples",
        "docs",
    )
    question = re.compile(r'^ *"""(?:Who|What|Whether)\b.*', re.MULTILINE)
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert [f"{file}: {text}" for file in files for text in question.findall(file.read_text("utf-8"))] == []


SUITES = Path(__file__).parents[2] / "tests" / "README.md"


def _rows_of_runs(kind: str) -> list[list[str]]:
    """Return the cells of the table of this kind, below its heading."""
    lines = SUITES.read_text(encoding="utf-8").splitlines()
    start = lines.index(f"| {' | '.join(HEADINGS[kind])} |") + 2
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def _numbers(cells: list[str]) -> list[int]:
    return [int(cell.replace(",", "")) for cell in cells]


def test_every_fault_has_a_row_of_a_run_that_passed() -> None:
    """Each once, in order; it was provoked as often as its test requires, and nothing was lost or counted twice."""
    *rows, total = (FaultRow(cells[0], *_numbers(cells[1:])) for cells in _rows_of_runs("faults"))
    faults = list(rows)
    assert [row.fault for row in faults] == list(FAULTS)
    for row in faults:
        assert row.provoked >= FAULTS[row.fault].least, row
        assert (row.once, row.lost, row.twice) == (row.sent, 0, 0), row
    assert total == with_total(faults)[-1]


def test_every_injection_is_of_a_run_that_passed() -> None:
    """Each program was run with each fault, and no life lost anything."""
    *rows, total = (
        InjectionRow(cells[0], cells[1], *_numbers(cells[2:])) for cells in _rows_of_runs("injections")
    )
    assert list(dict.fromkeys(row.program for row in rows)) == list(PROGRAMS)
    assert all(row.lives > 0 for row in rows)
    assert total == with_total(rows)[-1]
    assert total.lost == 0


def test_every_attack_has_a_row_of_a_run_in_which_none_succeeded() -> None:
    """Each once, in order, with what stops it and where it is visible."""
    rows = _rows_of_runs("attacks")
    found = [(name, stopped_by, seen) for name, _, _, stopped_by, seen in rows]
    assert found == [(each.name, each.stopped_by, each.visible_in) for each in ATTACKS.values()]
    for name, tried, succeeded, _, _ in rows:
        assert int(tried.replace(",", "")) > 0, name
        assert succeeded == "0", name
