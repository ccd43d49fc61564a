"""`aggregator dashboard`."""

import logging
from pathlib import Path

import click

from aggregator.cli.state import EXTRAS
from protocol.cli import (
    config_option,
    examples,
    require_packages,
    setting,
    start_logging,
    verbose_option,
)
from protocol.service_manager import stop_on_terminate

log = logging.getLogger(__name__)


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
    from aggregator.http.process import PACKAGES, http_options
    from protocol.log import event

    require_packages(*PACKAGES, extras=EXTRAS)
    options = http_options(http, token_file=http_token_file, hosts=http_host, extras=EXTRAS)
    if options is None:
        raise click.UsageError("expected --http as HOST:PORT")
    from aggregator.http.overview.app import overview, serve
    from aggregator.http.overview.fleets_file import read_fleets
    from aggregator.http.settings import HttpAddress, listen

    app = overview(read_fleets(fleets), token=options.token or options.read_token, hosts=options.hosts)
    listening = listen(options.address)
    shown = HttpAddress(options.address.host, int(listening.getsockname()[1]))
    event(log, logging.INFO, "dashboard started", url=f"http://{shown}/")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    stop_on_terminate()
    serve(app, listening)
