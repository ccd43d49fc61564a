"""Counts the functions that a program enters on its main ways: how much code one must know to follow each of them."""

import logging
import tempfile
from pathlib import Path

import click

from benchmarks.cost.ways import aggregator, device
from benchmarks.report import Table, json_option, write_json

PROGRAMS = {"aggregator": aggregator.measure, "edge-client": device.measure}


@click.command("ways")
@click.option(
    "--program", type=click.Choice(list(PROGRAMS)), default="aggregator", show_default=True,
    help="The program that is traced: the aggregator's upload, head, rollback and start, or the device's images, "
    "head, prediction and start.",
)  # fmt: skip
@click.option(
    "--list", "is_listed", is_flag=True, help="Print the functions, in the order of their first call."
)
@json_option
def command(*, program: str, is_listed: bool, json_file: Path | None) -> None:
    """Count the functions that a program enters on its main ways, and in its start."""
    logging.getLogger("paho").setLevel(logging.CRITICAL)  # it logs each end of `publish.single` as an error
    with tempfile.TemporaryDirectory() as folder:
        ways = PROGRAMS[program](Path(folder))
    table = Table({"way": "<10", "functions": ">11,"})
    for way, functions in ways.items():
        table.row(way, len(functions))
        if is_listed:
            click.echo("".join(f"  {function}\n" for function in functions))
    write_json(json_file, "ways", tables=[table], runs=ways)
