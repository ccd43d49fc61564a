"""The `--state` option, and opening the state directory to change it."""

import contextlib
import os
import pwd
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from protocol.cli import setting
from protocol.errors import ConfigError
from protocol.storage.state_folder import default_state_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aggregator.storage.store import Store

F = TypeVar("F", bound="Callable[..., Any]")

state_option = setting(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    default=lambda: default_state_folder("protofleet-aggregator"),
    show_default=False,
    help="State directory of the aggregator  [default: ~/.local/state/protofleet-aggregator]",
)


@contextlib.contextmanager
def existing_state(folder: Path) -> "Iterator[Store]":
    """Open the existing state of a state directory for writing.

    Raises:
        ConfigError: the directory lacks what belongs to the fleet's tables, which are elsewhere.
        StateError: there is no state, or it cannot be used.
    """
    from aggregator.storage.open_store import open_store

    # It raises where there is none, instead of creating one.
    with contextlib.closing(open_store(folder, read_only=True)) as found:
        found.database.check_folder()
    require_owner(folder)
    with contextlib.closing(open_store(folder)) as store:
        yield store


def require_owner(folder: Path) -> None:
    """Refuse to run as root in another user's folder, where the aggregator could not read the files.

    Raises:
        ConfigError: root runs this in another user's folder.
    """
    if os.geteuid() == 0 and folder.is_dir() and (owner := folder.stat().st_uid) != 0:
        try:
            name = pwd.getpwuid(owner).pw_name
        except KeyError:
            name = f"#{owner}"
        raise ConfigError(
            f"{folder} belongs to {name}, who could not read files written by root: run it with sudo -u {name}"
        )
