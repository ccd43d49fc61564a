"""`aggregator doctor`."""

import copy
from pathlib import Path
from typing import Any

import click

from aggregator.cli.run import run_command
from aggregator.cli.state import EXTRAS, state_option, store_option
from protocol.cli import access_options, config_option, examples, read_access, require_packages, setting

_UNUSED = (
    "embedded_broker", "external_training", "http", "http_token_file", "http_read_token_file", "http_host",
    "log_format", "verbose",
)  # fmt: skip
"""Options of `run` that no check needs; a service's configuration file may have them."""


def _accept_unused(command: click.Command) -> click.Command:
    for each in run_command.params:
        if each.name in _UNUSED and isinstance(each, click.Option):
            unused = copy.copy(each)
            unused.hidden = True
            command.params.append(unused)
    return command


@_accept_unused
@click.command("doctor", epilog=examples("aggregator doctor --task task.toml --broker broker.example --tls"))
@config_option
@setting("--task", type=click.Path(dir_okay=False, path_type=Path), help="Task file (TOML).")
@state_option
@setting("--blobs", default="", metavar="s3://BUCKET/PREFIX", help="Object store, as of `run`.")
@store_option("PostgreSQL database, as of `run`.")
@setting(
    "--broker", default="127.0.0.1", metavar="HOST[:PORT][,...]", help="MQTT broker of the fleet, or several."
)
@access_options
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
    leave it 0. What it publishes are empty messages, which programs ignore.
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
