"""`aggregator top`: a status that is updated on a terminal."""

import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from aggregator.cli import cli
from aggregator.status.render import show_live
from aggregator.storage.open_store import open_store
from protocol.errors import StateError
from tests.support.messages.submissions import SERVED


def test_page_is_updated_until_it_is_interrupted(tmp_path: Path) -> None:
    """It shows a device that has joined since, a state that cannot be read, and control characters escaped."""
    store = open_store(tmp_path)
    store.facts.put(SERVED)
    output, steps = io.StringIO(), iter(("join", "damage", "end"))
    pages: list[str] = []

    def wait() -> None:
        pages.append(output.getvalue())
        output.truncate(0)
        match next(steps):
            case "join":
                store.devices.put_presence("shed-1", "online", now_s=1.0)
            case "damage":
                store.close()
                (tmp_path / "aggregator.sqlite").write_bytes(b"no database" * 1000)
            case "end":
                raise KeyboardInterrupt

    show_live(tmp_path, Console(file=output, force_terminal=True, width=120, height=40), wait=wait)
    assert ["not running" in page for page in pages] == [True, True, False]
    assert ["shed-1" in page for page in pages] == [False, True, False]
    assert "aggregator.sqlite" in pages[2]


def test_top_requires_a_state_and_a_terminal(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no aggregator state"):
        show_live(tmp_path, Console(file=io.StringIO()), wait=lambda: None)
    done = CliRunner().invoke(cli, ["top", "--state", str(tmp_path)])
    assert "use `aggregator status` elsewhere" in str(done.exception)
