"""The `--state` option."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from protocol.cli import setting
from protocol.storage.state_folder import default_state_folder

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

state_option = setting(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    default=lambda: default_state_folder("protofleet-aggregator"),
    show_default=False,
    help="State directory of the aggregator  [default: ~/.local/state/protofleet-aggregator]",
)
