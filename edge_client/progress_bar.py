"""A progress bar on a terminal; no output elsewhere."""

import math
import sys
from datetime import timedelta
from typing import Any

import click

from protocol.cli import plain


def describe_speed(images_per_s: float, left_s: float | None) -> str:
    """Return the speed and the time that is left as text; empty if it is unknown."""
    if left_s is None:
        return ""
    return f"{images_per_s:.1f} images/s, {timedelta(seconds=math.ceil(left_s))} left"


class Progress:
    """One progress bar, shown from the first update until it is closed; closing twice is allowed."""

    def __init__(self, label: str, *, estimates: bool = True) -> None:
        self._label = plain(label)
        self._estimates = estimates
        self._bar: Any = None

    def update(self, done: int, total: int, note: str | None = None) -> None:
        """Show `done` of `total`, and a note: without `estimates`, the only one of the time that is left."""
        if not sys.stderr.isatty() or (self._bar is None and done >= total):
            return
        if self._bar is None:
            self._bar = click.progressbar(
                length=total,
                label=self._label,
                file=sys.stderr,
                show_eta=self._estimates,
                item_show_func=lambda shown: shown,
            )
            self._bar.render_progress()
        self._bar.update(done - self._bar.pos, note)

    @property
    def is_shown(self) -> bool:
        """True while there is a bar on the terminal."""
        return self._bar is not None

    def close(self) -> None:
        """Leave the bar on the terminal and start a new line."""
        if self._bar is not None:
            self._bar.render_finish()
            self._bar = None
