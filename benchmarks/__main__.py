"""`python -m benchmarks GROUP COMMAND`: what a user compares."""

import functools
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

# Read by OpenMP when torch is first imported: spinning idle threads slow other processes down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from benchmarks import pages, ways
from protocol.cli import run

HELP = {"help_option_names": ["-h", "--help"]}


@dataclass(frozen=True)
class Entry:
    """A command, which is imported when it runs."""

    module: str
    help: str
    time: str
    """With the defaults, on two cores."""
    is_first: bool
    """One of those that a user compares first."""
    quick: Mapping[str, Any]
    """Parameters of `--quick`."""


def _entry(module: str, text: str, time: str, *, is_first: bool = False, **quick: Any) -> Entry:
    return Entry(f"benchmarks.{module}", text, time, is_first, quick)


def _first(module: str, text: str, time: str, **quick: Any) -> Entry:
    return _entry(module, text, time, is_first=True, **quick)


DEVICE = {
    "start": _first("device.start", "Time and memory until the first message", "1 min"),
    "predict": _first("device.predict", "Predictions of photographs", "3 min", repetitions=1, images=20),
    "features": _first(
        *("device.features", "Features of 1,000 photographs", "20 min"),
        models=["mobilenetv3_small_100"], images=[20, 100], repetitions=1,
    ),
    "service": _entry(
        *("device.service", "The service and its jobs: start, memory, first build", "15 min"),
        models=["test_resnet"], images=[20, 100], grouped=500, repetitions=1,
    ),
    "int8": _entry(
        *("device.int8", "Backbones of 8 bits beside float32", "10 min"),
        networks=["mobilenetv2_100"], sizes=[96], repetitions=3,
    ),
    "wasm": _entry(
        *("device.wasm", "Backbones and photographs as in a browser", "5 min"),
        networks=["tf_mobilenetv3_small_100"], repetitions=3,
    ),
}  # fmt: skip
FLEET = {
    "flower": _first(
        *("fleet.flower.command", "Beside Flower: accuracy, time, bytes, memory", "40 min"),
        images=1000,
        rounds=3,
    ),
    "size": _first("fleet.size", "Cost of a device in fleets of 100 to 3,000", "5 min", devices=[50, 100]),
    "memory": _entry("fleet.memory", "Memory of the aggregator at rest", "2 min", rest_s=1.0, repetitions=1),
    "storm": _first("fleet.storm", "All devices return after a crash", "1 min", devices=200),
}
ACCURACY = {
    "which": _first(
        *("accuracy.which", "Every algorithm on the same seven fleets", "1 h"),
        names=["alike-few"], algorithms=["fedtc", "statistics", "hierarchical"], seeds=[0],
    ),
    "wire": _first(
        *("accuracy.wire.command", "Bytes and accuracy, beside what else devices could send", "5 h"),
        images=2000, names=["FedTC", "statistics, groups"], seeds=[0],
    ),
    "few": _first(
        *("accuracy.few_images", "How many images a class needs", "1 h"),
        names=["fashion_mnist"], sizes=[5, 20], seeds=[0],
    ),
    "fedtc": _entry(
        *("accuracy.fedtc", "FedTC under the partitions of its paper", "30 min"),
        partitions=["dirichlet:0.1"], images=200, ceiling=False,
    ),
}  # fmt: skip
COST = {
    "train": _first(
        *("cost.train", "A head of FedTC beside the paper's recipe", "1 h"),
        names=["fashion_mnist"], epochs=4, turns=1,
    ),
    "ingest": _entry("cost.uploads.ingest", "Uploads as fast as a socket takes them", "5 min", repetitions=1),
    "stored": _entry(
        *("cost.uploads.stored", "An aggregator with 100,000 stored submissions", "3 min"),
        submissions=[1000],
    ),
    "databases": _entry("cost.uploads.databases", "PostgreSQL beside SQLite", "5 min", devices=[1000]),
}  # fmt: skip
GROUPS: Mapping[str, tuple[str, Mapping[str, Entry]]] = {
    "device": ("What a device pays, beside PyTorch and ONNX Runtime.", DEVICE),
    "fleet": ("A fleet with real programs and connections.", FLEET),
    "accuracy": ("Accuracy of heads, on public data and simulated fleets.", ACCURACY),
    "cost": ("What the server pays.", COST),
}


@functools.cache
def loaded(group: str, name: str) -> click.Command:
    """Return a command, with `--quick` if there is a quick way to run it."""
    entry = GROUPS[group][1][name]
    command: click.Command = importlib.import_module(entry.module).command
    if entry.quick:
        command.params.append(_quick(entry.quick))
    return command


def _quick(values: Mapping[str, Any]) -> click.Option:
    def use(context: click.Context, _option: click.Parameter, is_quick: bool) -> None:  # noqa: FBT001 - of click
        if is_quick:
            context.default_map = dict(values)

    return click.Option(
        ["--quick"], is_flag=True, is_eager=True, expose_value=False, callback=use,
        help="Try it in a minute or two, with fewer runs and data, once the features are extracted.",
    )  # fmt: skip


class Group(click.Group):
    """The commands of a group, listed without importing them."""

    def list_commands(self, _context: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(GROUPS[self.name or ""][1])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return a command by its name; None if there is none."""
        return loaded(self.name or "", name) if name in self.list_commands(context) else None

    def format_commands(self, _context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with its time."""
        _write("Commands, with the time they take on two cores", GROUPS[self.name or ""][1], formatter)


class Overview(click.Group):
    """The groups, and the commands that a user compares first."""

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write groups, first commands and the rest."""
        first = {
            f"{group} {name}": entry
            for group, (_, entries) in GROUPS.items()
            for name, entry in entries.items()
            if entry.is_first
        }
        _write("What a user compares first, with the time on two cores", first, formatter)
        super().format_commands(context, formatter)


def _write(title: str, entries: Mapping[str, Entry], formatter: click.HelpFormatter) -> None:
    rows: Sequence[tuple[str, str]] = [
        (name, f"{entry.help} ({entry.time}{', or --quick' if entry.quick else ''})")
        for name, entry in entries.items()
    ]
    with formatter.section(title):
        formatter.write_dl(rows)


@click.group(cls=Overview, context_settings=HELP)
def cli() -> None:
    """Measure protofleet beside what else one could use, on this machine and on public data.

    `GROUP --help` lists the commands of a group.
    """


cli.add_command(pages.command)
cli.add_command(ways.command)
for group, (text, _) in GROUPS.items():
    cli.add_command(Group(group, help=text, context_settings=HELP))

if __name__ == "__main__":
    run(cli, program="python -m benchmarks")
