"""The pages agree with the code: settings, options, log lines, links and generated pages."""

import re
import tomllib
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from msgspec.structs import replace

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.registry import ALGORITHMS
from aggregator.cli import cli as aggregator
from aggregator.config.schema import (
    Client,
    Limits,
    PrivacyBudget,
    PrivacySettings,
    Robust,
    Rounds,
    TaskFile,
)
from aggregator.coordination.rollout_state import Settings
from aggregator.tasks.manifests import task_manifest
from docs import generate_architecture, generate_cli, generate_status_schema, generate_wire
from edge_client.cli import cli as edge_client
from protocol.wire.codec import encode
from protocol.wire.messages import BlobRef, Perturbation
from tests.docs.command_lines import parse

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
    ROOT / "tests" / "README.md",
]

DEFAULTS = {
    "": TaskFile(classes=("a", "b"), backbones=("b.onnx",)),
    "client": Client(),
    "training": Training(),
    "rounds": Rounds(),
    "rollout": Settings(),
    "robust": Robust(),
    "limits": Limits(),
    "privacy.perturbation": Perturbation(on="prototypes", scale=0.1),
    "privacy.dp": PrivacyBudget(epsilon=2.0, clip_norm=1.0, max_epsilon=8.0),
    **{name: kind() for name, kind in ALGORITHMS.items() if kind.__struct_fields__},
}
OTHER_VALUES: dict[str, dict[str, Any]] = {
    "": {
        "classes": ("b", "a"),
        "fleet": "orchard",
        "devices": ("shed-1",),
        "max_submission_mb": 1.0,
        "quorum": 2,
        "deadline_s": 1.0,
        "retrain_after": 2,
        "unfinished_h": 1.0,
    },
    "client": {"alpha": 0.5, "batch_size": 7, "min_images": 3, "seed": 1},
    "training": {
        "recipe": "paper",
        "calibrate": False,
        "restore": False,
        "epochs": 1,
        "device": "cpu",
        "seed": 1,
    },
    "rounds": {"grace_s": 1.0, "min_devices": 2, "staleness": 0},
    "robust": {"detect_outliers": False, "false_alarm_rate": 0.05, "clip_multiple": 0.0},
    "limits": {"heads_per_hour": 7, "downloads_per_hour": 7, "kept_heads": 70},
    "rollout": {
        "canary_fraction": 0.5,
        "min_canaries": 1,
        "tolerated_fraction": 0.25,
        "margin": 0.5,
        "canary_timeout_s": 1.0,
    },
    "privacy.perturbation": {"on": "images", "noise": "laplace", "scale": 0.5, "shrink": 0.5},
    "privacy.dp": {"epsilon": 4.0, "delta": 1e-6, "clip_norm": 2.0, "max_epsilon": 9.0},
}


def rows(text: str) -> list[list[str]]:
    """Return the cells of each row of the tables in a text, without headings."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [row for row in cells if row[0].startswith(("`", "**`"))]


def settings() -> dict[tuple[str, str], list[str]]:
    """Return the row of each setting, by its table in the task file and its name."""
    table = ""
    found = {}
    for row in rows(PAGES_OF_TASKS["task-file"]):
        if row[0].startswith("**"):
            table = row[0].strip("*`[]")
        else:
            found[table, row[0].strip("`")] = row
    return found


def test_every_setting_of_the_task_file_is_explained() -> None:
    """The table has the task file's settings, each once, and no others."""
    known = {(table, name) for table, struct in DEFAULTS.items() for name in struct.__struct_fields__}
    tables = {("", table.partition(".")[0]) for table in DEFAULTS}
    assert set(settings()) == known - tables


@pytest.mark.parametrize(("table", "name"), settings())
def test_default_of_a_setting_is_documented(table: str, name: str) -> None:
    """A value in the column of defaults is the setting's default; words mean no value."""
    cell = settings()[table, name][1]
    default = getattr(DEFAULTS[table], name)
    if cell.startswith("`"):
        assert tomllib.loads(f"value = {cell.strip('`')}")["value"] == default
    else:
        assert cell == "required" or default is None


def task_bytes(task: TaskFile) -> bytes:
    """Return the task manifest, whose sha256 is the task's identity."""
    return encode(task_manifest(task, [BlobRef(digest=bytes(32), size_bytes=1, name=task.backbones[0])]))


def with_table(table: str, value: msgspec.Struct) -> TaskFile:
    """Return a task file with one table, by its path; the whole file for ""."""
    task = DEFAULTS[""] if table else value
    assert isinstance(task, TaskFile)
    outer, _, inner = table.partition(".")
    if inner:
        value = replace(PrivacySettings(), **{inner: value})
    return replace(task, **{outer: value}) if outer else task


@pytest.mark.parametrize(
    ("table", "name"), [(table, name) for table, values in OTHER_VALUES.items() for name in values]
)
def test_settings_that_change_the_task_are_marked(table: str, name: str) -> None:
    """A change of a setting changes the task's identity exactly where the table says so."""
    base = DEFAULTS[table]
    task, changed = (
        with_table(table, base),
        with_table(table, replace(base, **{name: OTHER_VALUES[table][name]})),
    )
    assert (task_bytes(changed) != task_bytes(task)) == (settings()[table, name][3] == "yes")


@pytest.mark.parametrize(("program", "command"), [("edge-client", edge_client), ("aggregator", aggregator)])
def test_every_command_is_explained(program: str, command: click.Group) -> None:
    """The operations pages mention every subcommand."""
    for name in command.commands:
        assert f"`{program} {name}" in OPERATIONS or f"\n{program} {name}" in OPERATIONS


def test_every_help_ends_with_examples_that_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder with the files that they name."""
    for name in ("photos", "new-key"):
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_a_target(page: Path) -> None:
    """A link into the repository leads to a file."""
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    "module", [generate_status_schema, generate_cli, generate_architecture, generate_wire]
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
