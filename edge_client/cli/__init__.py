"""The `edge-client` program. Commands import what they need when they run, so that `--help` answers at once."""

import protocol.first_process  # noqa: F401 - before all others

# isort: split

import click

from edge_client.cli.cost import cost_command
from edge_client.cli.doctor import doctor_command
from edge_client.cli.init import init_command
from edge_client.cli.join import join_command
from edge_client.cli.predict import predict_command
from edge_client.cli.review import review_command
from edge_client.cli.run import dry_run_command, run_command
from edge_client.cli.serve import serve_command
from edge_client.cli.status import adopt_spent_command, make_key_command, status_command, take_over_command
from edge_client.cli.watch import watch_command
from protocol.cli import Commands, examples, run

__all__ = ["cli", "main"]


class _Program(Commands):
    """Commands; without one, arguments are those of `run`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        is_for_run = args[0].startswith("-") if args else not context.resilient_parsing
        if is_for_run and args[:1] not in (["-h"], ["--help"], ["--version"]):
            args = ["run", *args]
        return super().parse_args(context, args)


@click.group(
    cls=_Program,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "edge-client --broker broker.example --data /srv/images",
        "edge-client run --config /etc/protofleet/edge-client.toml",
        "edge-client predict photo.jpg",
    ),
)
@click.version_option(package_name="protofleet")
def cli() -> None:
    """Train a classifier head with a fleet, and use it: images stay on this device.

    Without a command, options are those of `run`.
    """


for _command in (
    init_command,
    run_command,
    join_command,
    dry_run_command,
    cost_command,
    doctor_command,
    status_command,
    predict_command,
    serve_command,
    watch_command,
    review_command,
    take_over_command,
    adopt_spent_command,
    make_key_command,
):
    cli.add_command(_command)


def main() -> None:
    """Run the console script."""
    run(cli, program="edge-client", extras="cpu")
