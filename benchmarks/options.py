"""Options of several benchmarks."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

Option = Callable[[Callable[..., None]], Callable[..., None]]


def repeated(*names: str, **attributes: Any) -> Option:
    """Return a `click.option` that may be given several times, and shows its default."""
    return click.option(*names, multiple=True, show_default=True, **attributes)


def selected(*names: str, choices: Iterable[str]) -> Option:
    """Return a `click.option` that selects some of the choices; all of them are the default."""
    every = tuple(choices)
    told = "May be repeated.  [default: all]"
    return click.option(*names, type=click.Choice(every), multiple=True, default=every, help=told)


resume_option = click.option(
    "--resume",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File that --json wrote earlier: its runs are not repeated, and are in the tables and in the new file.",
)
