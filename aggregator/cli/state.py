"""The `--state` option, and opening the state directory to change it."""

import contextlib
import os
import pwd
from pathlib import Path
from typing import TYPE_CHECKING

import click

from protocol.cli import setting
from protocol.errors import ConfigError
from protocol.storage.state_folder import default_state_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aggregator.storage.store import Store

EXTRAS = "aggregator,cpu"
"""Extras of the package that the program needs."""

state_option = setting(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    default=lambda: default_state_folder("protofleet-aggregator"),
    show_default=False,
    help="State directory of the aggregator  [default: ~/.local/state/protofleet-aggregator]",
)


@contextlib.contextmanager
def existing_state(folder: Path) -> "Iterator[Store]":
    """Open an existing state directory for writing."""
    from aggregator.storage.store import Store

    Store(folder, read_only=True).close()  # raises where there is none, instead of creating one
    require_owner(folder)
    with contextlib.closing(Store(folder)) as store:
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
