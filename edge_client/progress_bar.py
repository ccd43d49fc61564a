"""A progress bar on a terminal; no output elsewhere."""

import sys
from typing import Any

import click

from protocol.cli import plain


class Progress:
    """One progress bar, shown from the first update until it is closed; closing twice is allowed."""

    def __init__(self, label: str) -> None:
        self._label = plain(label)
        self._bar: Any = None

    def update(self, done: int, total: int) -> None:
        """Show `done` of `total`."""
        if not sys.stderr.isatty() or (self._bar is None and done >= total):
            return
        if self._bar is None:
            self._bar = click.progressbar(length=total, label=self._label, file=sys.stderr)
            self._bar.render_progress()
        self._bar.update(done - self._bar.pos)

    def close(self) -> None:
        """Leave the bar on the terminal and start a new line."""
        if self._bar is not None:
            self._bar.render_finish()
            self._bar = None
