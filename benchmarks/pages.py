"""`python -m benchmarks report`: write the stored results of benchmarks into the documents.

A page has a block for each result, between the lines `<!-- benchmark NAME -->` and `<!-- end of NAME -->`. The block is
made of `benchmarks/results/NAME.json`, which `python -m benchmarks ... --json` writes.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from protocol.errors import ConfigError

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs", ROOT / "benchmarks" / "reports")
PACKAGES = {"onnxruntime": "ONNX Runtime", "torch": "PyTorch", "numpy": "numpy"}
"""Packages whose versions a page names."""

_COLORS = [f"C{number}" for number in range(10)]
CROWDED = 6
"""Lines beside which a legend has no room within the axes."""

MAX_TICKS = 8
"""Values on a logarithmic axis that are labelled each, not the powers of ten."""

_MARKERS = "osv^"
"""Of the first ten lines of a plot, of the next ten, ..."""

_BLOCK = re.compile(r"(<!-- benchmark (\S+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


@click.command("report")
@click.option(
    "--results",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=ROOT / "benchmarks" / "results",
    help="Folder of JSON files.  [default: benchmarks/results]",
)
@click.option(
    "--docs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    multiple=True,
    default=PAGES,
    help="Folder of pages, may be repeated; plots are written to its images.  [default: docs, benchmarks/reports]",
)
def command(*, results: Path, docs: tuple[Path, ...]) -> None:
    """Write tables and plots of stored results into the pages that name them."""
    reports = read_results(results)
    for page in (page for folder in docs for page in sorted(folder.glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        written = fill(text, reports)
        if written != text:
            page.write_text(written, encoding="utf-8")
            click.echo(f"wrote {page}")
        for _, name, _ in _BLOCK.findall(text):
            for number, plot in enumerate(reports[name]["plots"]):
                draw(plot, page.parent / _image(name, number))


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the stored results by name."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}


def fill(page: str, reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a page with the blocks of today's results.

    Raises:
        ConfigError: the page names results that are not stored.
    """

    def block(match: re.Match[str]) -> str:
        name = match[2]
        if name not in reports:
            raise ConfigError(
                f"no results of {name}: run the benchmark with --json benchmarks/results/{name}.json"
            )
        return f"{match[1]}{markdown(name, reports[name])}{match[3]}"

    return _BLOCK.sub(block, page)


def markdown(name: str, report: Mapping[str, Any]) -> str:
    """Return a result's command, machine, tables and plots."""
    return "\n".join(_lines(name, report)) + "\n"


def _lines(name: str, report: Mapping[str, Any]) -> Iterator[str]:
    machine = report["machine"]
    versions = ", ".join(f"{title} {machine[package]}" for package, title in PACKAGES.items())
    yield f"```console\n{report['command']}\n```\n"
    yield (
        f"{report['date']}, commit {report['commit']}: {machine['cores']} cores of {machine['processor']}, "
        f"Python {machine['python']}, {versions}."
    )
    for table in report["tables"]:
        yield f"\n{table['title']}:\n" if table["title"] else ""
        yield f"| {' | '.join(table['columns'])} |"
        yield "|" + "---|" * len(table["columns"])
        for row in table["rows"]:
            yield f"| {' | '.join(row)} |"
    for number, plot in enumerate(report["plots"]):
        yield f"\n![{plot['title']}]({_image(name, number)})"


def _image(name: str, number: int) -> str:
    return f"images/benchmark-{name}{f'-{number}' if number else ''}.svg"


def draw(plot: Mapping[str, Any], file: Path) -> None:
    """Write a plot as SVG; the same plot gives the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    crowded = len(plot["series"]) > CROWDED
    with mpl.rc_context({"svg.hashsalt": "protofleet", "font.size": 9}):
        figure = Figure(figsize=(9.6, 5.2) if crowded else (6.4, 3.8), layout="constrained")
        axes = figure.add_subplot()
        for number, (label, points) in enumerate(plot["series"].items()):
            color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number // len(_COLORS)]
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=4, label=label)
        axes.set(title=plot["title"], xlabel=plot["x"], ylabel=plot["y"])
        for axis in plot["log"]:
            getattr(axes, f"set_{axis}scale")("log")
            if axis == "x":  # 2 to 20 has one power of ten, which labels nothing
                values = sorted({x for points in plot["series"].values() for x, _ in points})
                if len(values) <= MAX_TICKS:
                    axes.set_xticks(values, [f"{value:g}" for value in values])
                    axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        if crowded:
            figure.legend(loc="outside right upper")
        else:
            axes.legend()
        figure.savefig(file, metadata={"Date": None})
