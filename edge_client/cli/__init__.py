"""The `edge-client` program. Commands import what they need when they run, so that `--help` answers at once."""

import protocol.first_process  # noqa: F401 - before all others

# isort: split

from edge_client.cli.doctor import doctor_command
from edge_client.cli.predict import predict_command
from edge_client.cli.review import review_command
from edge_client.cli.run import cli
from edge_client.cli.serve import serve_command
from edge_client.cli.status import make_key_command, status_command, take_over_command
from edge_client.cli.watch import watch_command
from protocol.cli import run

__all__ = ["cli", "main"]

for _command in (
    doctor_command,
    predict_command,
    review_command,
    serve_command,
    status_command,
    take_over_command,
    make_key_command,
    watch_command,
):
    cli.add_command(_command)


def main() -> None:
    """Run the console script."""
    run(cli, program="edge-client", extras="cpu")
