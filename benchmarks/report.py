"""Results of a benchmark: a table on stdout, row by row, and a JSON file with the machine and all runs."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

PACKAGES = ("numpy", "onnxruntime", "paho-mqtt", "torch")

json_option = click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the machine, the versions and every run to this file.",
)


class Table:
    """A table that is printed row by row, since a row may take minutes.

    `columns` maps each heading to the format of its cells, such as `"<16"` or `">8.2%"`.
    """

    def __init__(self, columns: Mapping[str, str], *, title: str = "") -> None:
        self._formats = tuple(columns.values())
        if title:
            click.echo(f"\n{title}")
        click.echo("".join(f"{name:{_alignment(spec)}}" for name, spec in columns.items()).rstrip())

    def row(self, *cells: Any) -> None:
        """Print a row; None is an empty cell."""
        texts = (
            f"{cell:{spec}}"
            if cell is not None and not isinstance(cell, str)
            else f"{cell or '':{_alignment(spec)}}"
            for cell, spec in zip(cells, self._formats, strict=True)
        )
        click.echo("".join(texts).rstrip())


def _alignment(spec: str) -> str:
    """Return a format's alignment and width alone."""
    return spec[0] + spec[1:].partition(".")[0].rstrip(",%fge")


def print_figures(figures: Mapping[str, float]) -> None:
    """Print one figure a line."""
    for name, value in figures.items():
        click.echo(f"{name:28} {value:,.3f}")


def write_json(file: Path | None, benchmark: str, **results: Any) -> None:
    """Write what was measured, and on which machine with which versions, if there is a file."""
    if file is not None:
        report = {"benchmark": benchmark, "machine": machine(), **results}
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Return what figures depend on beside the code: processor, system and versions."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }
