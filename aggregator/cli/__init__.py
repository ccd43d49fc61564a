"""The `aggregator` program. Commands import what they need when they run, so that `--help` answers at once."""

import protocol.first_process  # noqa: F401 - before all others

# isort: split

import click

from aggregator import EXTRAS
from aggregator.cli import enrollment, monitoring, operator_commands, programs, task_file
from protocol.cli import Commands, examples, run


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "aggregator init task.toml",
        "aggregator run --task task.toml --embedded-broker",
        "aggregator status",
    ),
)
@click.version_option(package_name="protofleet")
def cli() -> None:
    """Collect prototypes from a fleet, train a head on them, and publish it as ONNX."""


for _command in (
    *programs.COMMANDS,
    *monitoring.COMMANDS,
    *task_file.COMMANDS,
    *operator_commands.COMMANDS,
    *enrollment.COMMANDS,
):
    cli.add_command(_command)


def main() -> None:
    run(cli, program="aggregator", extras=EXTRAS)
