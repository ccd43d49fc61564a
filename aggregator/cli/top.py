"""`aggregator top`."""

import sys
import time
from pathlib import Path

import click

from aggregator.cli.state import EXTRAS, state_option
from protocol.cli import examples, require_packages
from protocol.errors import ConfigError


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

    from aggregator.status.live import show_live

    show_live(state, Console(), wait=lambda: time.sleep(interval_s))
