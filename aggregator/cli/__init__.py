"""The `aggregator` program. Commands import what they need when they run, so that `--help` answers at once."""

import click

from aggregator.cli.enrollment import (
    enroll_broker_command,
    enroll_command,
    reset_key_command,
    revoke_command,
)
from aggregator.cli.operate import promote_command, release_command, rollback_command, status_command
from aggregator.cli.run import run_command
from protocol.cli import run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="protofleet")
def cli() -> None:
    """Collect prototypes from a fleet, train a head on them, and publish it as ONNX."""


for _command in (
    *(run_command, status_command, rollback_command, promote_command, release_command),
    *(enroll_command, enroll_broker_command, revoke_command, reset_key_command),
):
    cli.add_command(_command)


def main() -> None:
    """Run the console script."""
    run(cli, program="aggregator")
