"""`aggregator status`, `top`, `doctor` and `dashboard`: what an operator sees of fleets."""

import copy
import logging
import sys
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from aggregator.cli.programs import run_command
from aggregator.cli.state import EXTRAS, state_option
from protocol.cli import (
    config_option,
    examples,
    read_access,
    require_packages,
    setting,
    start_logging,
    verbose_option,
)
from protocol.errors import ConfigError
from protocol.service_manager import stop_on_terminate

log = logging.getLogger(__name__)

_UNUSED = (
    "embedded_broker", "http", "http_token_file", "http_read_token_file", "http_host",
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


@click.command("top", epilog=examples("aggregator top --state /var/lib/protofleet/aggregator"))
@state_option
@click.option(
    "--interval-s",
    type=click.FloatRange(min=0.2),
    default=2.0,
    show_default=True,
    help="Seconds between updates.",
)
def top_command(*, state: Path, interval_s: float) -> None:
    """Show what `status` does, live on the terminal, until interrupted with Ctrl-C."""
    require_packages("rich", extras=EXTRAS)
    if not sys.stdout.isatty():
        raise ConfigError("expected a terminal: use `aggregator status` elsewhere")
    from rich.console import Console

    from aggregator.status.render import show_live

    show_live(state, Console(), wait=lambda: time.sleep(interval_s))


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


@click.command("dashboard", epilog=examples("aggregator dashboard fleets.toml --http 127.0.0.1:8080"))
@click.argument("fleets", type=click.Path(dir_okay=False, path_type=Path), metavar="FLEETS.TOML")
@config_option
@setting(
    "--http",
    default="127.0.0.1:8080",
    metavar="HOST:PORT",
    help="Address of the page and the JSON API.",
)
@setting(
    "--http-token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the token that the page requires, in line 1; or set PROTOFLEET_HTTP_TOKEN. Required unless --http "
    "is a loopback address.",
)
@setting(
    "--http-host",
    multiple=True,
    metavar="NAME",
    help="Name under which browsers reach the page, beside localhost and IP addresses; repeatable.",
)
@verbose_option
def dashboard_command(
    *, fleets: Path, http: str, http_token_file: Path | None, http_host: tuple[str, ...], verbose: bool
) -> None:
    """Show several fleets on one page, until interrupted.

    FLEETS.TOML names them: a table [fleets.NAME] with the url of each one's own dashboard, and a token_file where
    reading requires a token. Commands are on each one's own dashboard.
    """
    start_logging(verbose=verbose)
    from aggregator.http.settings import PACKAGES, HttpAddress, http_settings, listen
    from protocol.log import event

    require_packages(*PACKAGES, extras=EXTRAS)
    settings = http_settings(http, token_file=http_token_file, hosts=http_host, extras=EXTRAS)
    if settings is None:
        raise click.UsageError("expected --http as HOST:PORT")
    from aggregator.http.fleets import read_fleets
    from aggregator.http.overview import overview, serve

    app = overview(read_fleets(fleets), settings)
    listening = listen(settings.address)
    shown = HttpAddress(settings.address.host, int(listening.getsockname()[1]))
    event(log, logging.INFO, "dashboard started", url=f"http://{shown}/")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    stop_on_terminate()
    serve(app, listening)


COMMANDS = (status_command, top_command, doctor_command, dashboard_command)
