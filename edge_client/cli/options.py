"""Options of several commands, and the state directory that they name."""

import contextlib
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from protocol.cli import setting
from protocol.wire.topics import is_name

if TYPE_CHECKING:
    from edge_client.storage.device_state import DeviceState

FOLDER = click.Path(file_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)


@contextlib.contextmanager
def loading_modules() -> Iterator[None]:
    """Pause garbage collection, and exempt from it what exists afterwards: modules stay for as long as the program."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def inherit(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Return an option's value given before the command's name, unless one is given after it."""
    name = option.name or ""
    if context.parent is None or context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        return value
    return context.parent.params.get(name, value)


fleet_option = setting("--fleet", default="default", callback=inherit, help="Name of the fleet.")
state_option = setting(
    "--state",
    type=FOLDER,
    callback=inherit,
    help="State directory  [default: ~/.local/state/protofleet/FLEET]",
)
provider_option = setting(
    "--provider",
    type=click.Choice(["auto", "cpu", "cuda", "tensorrt"]),
    default="auto",
    callback=inherit,
    help="ONNX Runtime execution provider; auto uses CUDA if available.",
)
threads_option = setting(
    "--threads", type=COUNT, callback=inherit, help="Threads for the backbone  [default: all cores]"
)

prior_option = setting(
    "--prior",
    type=click.Choice(["auto", "none", "images", "labels"]),
    default="auto",
    help="Multiply probabilities by the classes' shares at this place: of the device's labeled images (`labels`), as "
    "estimated from the images to predict (`images`), or the labels' as long as these images agree with them (`auto`).",
)


def open_state(state: Path | None, fleet: str, **options: Any) -> "DeviceState":
    """Open the state directory that was given, or the fleet's; `options` are those of `DeviceState`."""
    from edge_client.storage.device_state import DeviceState
    from protocol.storage.state_folder import default_state_folder

    if not is_name(fleet):
        expected = "1 to 64 letters, digits, '-' or '_'"
        raise click.BadParameter(f"{fleet!r}: expected {expected}", param_hint="--fleet")
    return DeviceState(state or default_state_folder(f"protofleet/{fleet}"), **options)


def as_json_text(value: dict[str, Any], *, indent: int | None = None) -> str:
    """Return JSON, with null for NaN and infinity, which it lacks."""
    plain_values = json.loads(json.dumps(value, default=bytes.hex), parse_constant=lambda _: None)
    return json.dumps(plain_values, indent=indent, allow_nan=False)
