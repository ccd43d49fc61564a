"""A status on a terminal that is updated until the user interrupts it."""

import contextlib
import io
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from aggregator.status.collect import collect_status
from aggregator.status.render import render_page
from aggregator.storage.open_store import open_store
from protocol.cli import plain
from protocol.errors import ProtofleetError


def show_live(state: Path, console: Console, *, wait: Callable[[], None]) -> None:
    """Show the status of a state directory again after each `wait`, until that raises KeyboardInterrupt.

    A state that cannot be read is shown as such, and read again.

    Raises:
        StateError: there is no state.
    """
    with contextlib.closing(open_store(state, read_only=True)):
        pass
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        while True:
            live.update(_page(state, console), refresh=True)
            wait()


def _page(state: Path, console: Console) -> Text:
    """Return a page in the width and colors of a console, which shows another one meanwhile."""
    output = io.StringIO()
    page = Console(file=output, force_terminal=True, width=console.width)
    page.print(f"aggregator top  {datetime.now().astimezone():%H:%M:%S}  Ctrl-C ends", style="dim")
    try:
        with contextlib.closing(open_store(state, read_only=True)) as store:
            render_page(collect_status(store), page)
    except ProtofleetError as error:
        page.print(plain(str(error)), style="red", markup=False, highlight=False)
    return Text.from_ansi(output.getvalue(), no_wrap=True, overflow="ellipsis")
