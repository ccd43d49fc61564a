"""Results of a benchmark: tables on stdout, row by row, and a JSON file with the machine, all runs and the tables."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import click

from protocol.errors import ConfigError

PACKAGES = ("numpy", "onnxruntime", "paho-mqtt", "torch")
ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"


def check_committed(file: Path | None) -> Path | None:
    """Return a file for results.

    Raises:
        ConfigError: it is one of the stored results, and this checkout has changes, which no commit would name.
    """
    if file is not None and file.resolve().is_relative_to(ROOT / RESULTS) and commit().endswith("-dirty"):
        raise ConfigError(
            f"{file}: files of this checkout have changed since its commit: commit the changes first, or write the "
            "results to a file outside benchmarks/results"
        )
    return file


json_option = click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=lambda _context, _option, file: check_committed(file),  # before hours of measurements
    help="Write the machine, the versions and every run to this file; those in benchmarks/results need a commit.",
)


class Table:
    """A table that is printed row by row, since a row may take minutes.

    `columns` maps each heading to the format of its cells, such as `"<16"` or `">8.2%"`.
    """

    def __init__(self, columns: Mapping[str, str], *, title: str = "") -> None:
        self.title = title
        self.columns = dict(columns)
        self.rows: list[tuple[Any, ...]] = []
        if title:
            click.echo(f"\n{title}")
        click.echo("".join(f"{name:{_alignment(spec)}}" for name, spec in columns.items()).rstrip())

    def row(self, *cells: Any) -> None:
        """Print a row; None is an empty cell."""
        self.rows.append(cells)
        formats = zip(cells, self.columns.values(), strict=True)
        click.echo("".join(_padded(cell, spec) for cell, spec in formats).rstrip())

    def as_json(self) -> dict[str, Any]:
        """Return the title, the headings and the cells as they are printed, for `python -m benchmarks report`."""
        rows = [
            [_padded(cell, spec).strip() for cell, spec in zip(row, self.columns.values(), strict=True)]
            for row in self.rows
        ]
        return {"title": self.title, "columns": list(self.columns), "rows": rows}


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Lines that `python -m benchmarks report` draws beside the tables."""

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    """Points (x, y) of each line."""
    log: tuple[Literal["x", "y"], ...] = ()
    """Logarithmic axes."""


def _padded(cell: Any, spec: str) -> str:
    if cell is None or isinstance(cell, str):
        return f"{cell or '':{_alignment(spec)}}"
    return f"{cell:{spec}}"


def _alignment(spec: str) -> str:
    """Return a format's alignment and width alone."""
    return spec[0] + spec[1:].partition(".")[0].rstrip(",%fge")


def write_json(
    file: Path | None,
    benchmark: str,
    *,
    tables: Sequence[Table] = (),
    plots: Sequence[Plot] = (),
    **results: Any,
) -> None:
    """Write what was measured, when, by which command and on which machine with which versions, if there is a file."""
    if file is None:
        return
    check_committed(file)
    report = {
        "benchmark": benchmark,
        "command": _command(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "tables": [table.as_json() for table in tables],
        "plots": [asdict(plot) for plot in plots],
        **results,
    }
    file.write_text(as_lines(report), encoding="utf-8")


def as_lines(report: Mapping[str, Any]) -> str:
    """Return a report as JSON with one line for each row of a table, and for each run."""
    lists = {"tables": 2}  # of tables, and of rows in a table
    values = (
        f" {json.dumps(name)}: {_expanded(value, lists.get(name, 1), 1)}" for name, value in report.items()
    )
    return "{\n" + ",\n".join(values) + "\n}\n"


def _expanded(value: Any, lists: int, indent: int) -> str:
    """Return a value as JSON: an item on each line where it contains lists or mappings, in so many nested lists."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not lists or not any(isinstance(each, dict | list) for each in items):
        return json.dumps(value)
    margin = "\n" + " " * (indent + 1)
    if isinstance(value, dict):
        parts = (f"{json.dumps(name)}: {_expanded(each, lists, indent + 1)}" for name, each in value.items())
        return "{" + margin + f",{margin}".join(parts) + margin[:-1] + "}"
    parts = (_expanded(each, lists - 1, indent + 1) for each in value)
    return "[" + margin + f",{margin}".join(parts) + margin[:-1] + "]"


def _command() -> str:
    """Return the command line that is running, without `--json`."""
    words = sys.argv[1:]
    if "--json" in words:
        at = words.index("--json")
        words = words[:at] + words[at + 2 :]
    program = "research" if Path(sys.argv[0]).parent.name == "research" else "benchmarks"
    return shlex.join(["python", "-m", program, *words])


def commit() -> str:
    """Return the commit of this checkout, with `-dirty` after changes; an empty string without git.

    Documents and stored results are not part of what is measured.
    """
    documents = (":!docs", ":!*.md", f":!{RESULTS}")
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        described = _git("describe", "--always", "--abbrev=7")
        is_changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *documents)
        return described + ("-dirty" if is_changed else "")
    return ""


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> dict[str, Any]:
    """Return what figures depend on beside the code: processor, system and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _processor() -> str:
    """Return the processor's name, which `platform` does not know on Linux."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
