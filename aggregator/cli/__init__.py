"""The `aggregator` program. Commands import what they need when they run, so that `--help` answers at once."""

import click

from aggregator.cli import enrollment, monitoring, operator_commands, task_file
from aggregator.cli.programs import receive_command, train_command
from aggregator.cli.run import coordinate_command, run_command
from aggregator.cli.state import EXTRAS
from protocol.cli import examples, run


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "aggregator init task.toml", "aggregator run --task task.toml --embedded-broker", "aggregator top"
    ),
)
@click.version_option(package_name="protofleet")
def cli() -> None:
    """Collect prototypes from a fleet, train a head on them, and publish it as ONNX."""


for _command in (
    run_command,
    coordinate_command,
    receive_command,
    train_command,
    *monitoring.COMMANDS,
    *task_file.COMMANDS,
    *operator_commands.COMMANDS,
    *enrollment.COMMANDS,
):
    cli.add_command(_command)


def main() -> None:
    """Run the console script."""
    run(cli, program="aggregator", extras=EXTRAS)
