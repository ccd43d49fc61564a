"""Options of several benchmarks."""

from collections.abc import Callable, Iterable
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
