"""`aggregator status` and `doctor`: what an operator sees of a fleet."""

import copy
import logging
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from aggregator import EXTRAS
from aggregator.cli.programs import run_command
from aggregator.cli.state import state_option
from protocol.cli import (
    examples,
    read_access,
    require_packages,
)

log = logging.getLogger(__name__)

_UNUSED = (
    "embedded_broker", "http", "http_token_file", "http_read_token_file", "http_host", "http_cert", "http_key",
    "log_format", "verbose",
)  # fmt: skip
"""Options of `run` that no check needs; a service's configuration file may have them."""


@click.command("status", epilog=examples("aggregator status", "aggregator status --json"))
@state_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as in docs/status.schema.json.")
def status_command(*, state: Path, as_json: bool) -> None:
    """Show devices, submissions, covered classes and heads."""
    if not as_json:
        require_packages("rich", extras=EXTRAS)
    from aggregator.status.collect import collect_status
    from aggregator.storage.open_store import open_store

    status = collect_status(open_store(state, read_only=True))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(status), indent=2))
        return
    from rich.console import Console

    from aggregator.status.render import render_status

    # Without a terminal there is no width to wrap at.
    render_status(status, Console(width=None if sys.stdout.isatty() else 200))


def _options_of_run(command: click.Command) -> click.Command:
    """Add the options of `run`, none of them required; those that no check needs are hidden."""
    for number, each in enumerate(run_command.params):
        option = copy.copy(each)
        option.required = False
        if isinstance(option, click.Option):
            option.hidden = option.name in _UNUSED
        command.params.insert(number, option)
    return command


@_options_of_run
@click.command("doctor", epilog=examples("aggregator doctor --task task.toml --broker broker.example --tls"))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor_command(
    context: click.Context,
    /,
    *,
    task: Path | None,
    state: Path,
    blobs: str,
    database: str,
    broker: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Check packages, task file, state, blobs, disk, clock, keys, broker, TLS, login, access list and packet limit.

    Takes the options of `run`, changes nothing, and says what to do. The exit status is 1 if a check failed; warnings
    leave it 0. Programs ignore what it publishes.
    """
    require_packages("onnx", "scipy", extras=EXTRAS)
    from aggregator.doctor import Surroundings, check_all
    from protocol.doctor.findings import report
    from protocol.mqtt.tls import parse_brokers

    access = read_access(**{name: value for name, value in options.items() if name not in _UNUSED})
    given = Surroundings(
        task, state, parse_brokers(broker, tls=access.tls), access, store=database, blobs=blobs
    )
    context.exit(report(check_all(given), as_json=as_json))


COMMANDS = (status_command, doctor_command)
