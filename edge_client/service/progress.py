"""A progress bar where a person watches, and nothing elsewhere."""

import sys
from typing import Any

import click

from protocol.cli import plain


class Progress:
    """One bar, from its first update until it is closed; it may be closed more than once."""

    def __init__(self, label: str) -> None:
        self._label = plain(label)
        self._bar: Any = None

    def update(self, done: int, total: int) -> None:
        """Show that `done` of `total` are done."""
        if not sys.stderr.isatty() or (self._bar is None and done >= total):
            return
        if self._bar is None:
            self._bar = click.progressbar(length=total, label=self._label, file=sys.stderr)
            self._bar.render_progress()
        self._bar.update(done - self._bar.pos)

    def close(self) -> None:
        """Leave the bar as it is, and the next line to others."""
        if self._bar is not None:
            self._bar.render_finish()
            self._bar = None
