"""Options of several commands, their values in a file, and the state directory that they name."""

import contextlib
import gc
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from protocol.cli import F, access_options, config_option_of, read_settings, setting, settings_of
from protocol.wire.messages import MAX_SUMMED
from protocol.wire.topics import is_name

if TYPE_CHECKING:
    from edge_client.store.device_state import DeviceState

FOLDER = click.Path(file_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)

CONDITIONAL = "these epsilons are conditional: they hold only if the second operator is honest"

MAX_DELTA = 1e-3
"""Delta is the probability that epsilon does not hold: with a large one, any epsilon would be within the budget."""

CONFIG, _ENROLLMENT = f"{__name__}.config", f"{__name__}.enrollment"
"""Keys of `Context.meta`."""

PRIVACY = (
    *("max_epsilon", "max_delta", "max_local_epsilon", "privacy_unit", "allow_non_private_tasks"),
    *("second_operator", "min_devices", "pin_backbone", "variable_time", "max_images", "upload_period_s"),
)
"""Keys of the table [privacy]."""


@contextlib.contextmanager
def loading_modules() -> Iterator[None]:
    """Pause garbage collection, and exempt from it what exists afterwards: modules stay for as long as the program."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _public_key(text: str) -> bytes:
    """Return 32 bytes from 64 hex digits."""
    if re.fullmatch("[0-9A-Fa-f]{64}", text) is None:
        raise click.BadParameter(f"expected a public key, 64 hex digits, got {text!r}")
    return bytes.fromhex(text)


def _digest(text: str) -> bytes:
    """Return 32 bytes from 64 hex digits."""
    if re.fullmatch("[0-9A-Fa-f]{64}", text) is None:
        raise click.BadParameter(f"expected a file's sha256, 64 hex digits, got {text!r}")
    return bytes.fromhex(text)


def _load_config(context: click.Context, _option: click.Parameter, file: Path | None) -> None:
    """Use a file as defaults of the command's options.

    Outside of tables it has the options of `run`, which apply to every command with the same option, in [privacy] those
    of privacy, and in [COMMAND] those of another command. The whole file is checked, whatever the command.
    """
    if file is None:
        return
    context.meta[CONFIG] = file
    commands = cast("click.Group", context.find_root().command).commands
    tables = {
        name: settings_of(command)
        for name, command in commands.items()
        if any(each.name == "config" for each in command.params)
    }
    of_run = tables.pop("run")
    del of_run["serve"], of_run["watch"]  # which their tables stand for
    privacy = {name: of_run.pop(name) for name in PRIVACY}
    given = read_settings(context, file, {"": of_run, "privacy": privacy, **tables})
    shared = {each.name: each.envvar for each in (*of_run.values(), *privacy.values())}
    own = {each.name: each.envvar for each in settings_of(context.command).values()}
    context.default_map = {
        name: value
        for name, value in {**given[""], **given.get("privacy", {})}.items()
        if name in own and own[name] == shared[name]  # `watch` has a --username of another broker
    } | given.get(str(context.command.name), {})
    if context.command.name == "run":
        context.default_map |= {"serve": "serve" in given, "watch": given.get("watch", {}).get("folder")}


config_option = config_option_of(
    _load_config,
    text="TOML file with options of `run`, without the leading dashes, and tables: [privacy], and [COMMAND] for those "
    "of another command.",
)


def _enrollment(context: click.Context, _option: click.Parameter, value: Path | None) -> Path | None:
    context.meta[_ENROLLMENT] = value
    return value


def _given_fleet(context: click.Context, _option: click.Parameter, value: str) -> str | None:
    """Return the fleet that was given, or None if the enrollment names it."""
    is_default = context.get_parameter_source("fleet") is ParameterSource.DEFAULT
    return None if is_default and context.meta.get(_ENROLLMENT) is not None else value


def _fleet(context: click.Context, option: click.Parameter, value: str) -> str:
    """Return the fleet that was given, or else the enrollment's."""
    given = _given_fleet(context, option, value)
    if given is not None:
        return given
    from protocol.enrollment import read_card

    return read_card(context.meta[_ENROLLMENT]).fleet


def _all_of(*options: Callable[[F], F]) -> Callable[[F], F]:
    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_fleet_option = partial(setting, "--fleet", default="default", help="Name of the fleet.")
_state_option = setting(
    "--state", type=FOLDER, help="State directory  [default: ~/.local/state/protofleet/FLEET]"
)
state_options = _all_of(
    config_option,
    setting(
        "--enrollment",
        type=FOLDER,
        expose_value=False,
        callback=_enrollment,
        help="Enrollment directory, which names the fleet.",
    ),
    _fleet_option(callback=_fleet),
    _state_option,
)
"""Options of a command that needs the state of a device."""

data_option = setting(
    "--data",
    type=click.Path(path_type=Path),
    default=Path("data"),
    help="Directory with one subdirectory of images per class, or a CSV file with the columns path,label and perhaps "
    "person.",
)
member_options = _all_of(
    config_option,
    setting(
        "--enrollment",
        type=FOLDER,
        callback=_enrollment,
        help="Enrollment directory made by `aggregator enroll`: device id, fleet, broker and keys.",
    ),
    setting(
        "--broker", metavar="HOST[:PORT][,...]", help="MQTT broker of the fleet; several are tried in turn."
    ),
    access_options,
    data_option,
    _fleet_option(callback=_given_fleet),
    setting("--device-id", help="Device id  [default: derived from the machine]"),
    _state_option,
    setting(
        "--aggregator-key",
        type=_public_key,
        metavar="HEX",
        help="Public key of the aggregator, from `aggregator status`  [default: the first key received]",
    ),
)
"""Options of a command that takes part in the fleet with the device's images."""

provider_option = setting(
    "--provider",
    type=click.Choice(["auto", "cpu", "cuda", "tensorrt"]),
    default="auto",
    help="ONNX Runtime execution provider; auto uses CUDA if available.",
)
threads_option = setting("--threads", type=COUNT, help="Threads for the backbone  [default: all cores]")

extraction_options = _all_of(
    setting(
        "--holdout",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.2,
        help="Fraction of the images held out to evaluate heads.",
    ),
    provider_option,
    threads_option,
    setting("--batch-size", type=COUNT, default=16, hidden=True, help="Images per run of the backbone."),
)
backbone_option = setting(
    "--backbone",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Local copy of one of the task's backbones, used instead of a download; may be repeated.",
)
privacy_options = _all_of(
    setting(
        "--max-epsilon",
        type=click.FloatRange(0, min_open=True),
        help="Privacy budget (epsilon) for all submissions together; refuses tasks without differential privacy. With "
        "a second operator it is conditional: it holds only if that operator is honest.",
    ),
    setting(
        "--max-delta",
        type=click.FloatRange(0, MAX_DELTA, min_open=True),
        default=1e-5,
        help="Delta at which the budget is counted: a task with a larger one gets no more of it.",
    ),
    setting(
        "--max-local-epsilon",
        type=click.FloatRange(0, min_open=True),
        help="Budget (epsilon) of what both operators of masked sums see if they work together, for all submissions: "
        "this one is not conditional.  [default: no limit]",
    ),
    setting(
        "--privacy-unit",
        type=click.Choice(["image", "person"]),
        help="The weakest unit of differential privacy that a task may have: `person` refuses tasks that protect "
        "single images only, and both refuse tasks without differential privacy.  [default: any task]",
    ),
    setting(
        "--allow-non-private-tasks",
        is_flag=True,
        help="Take part in tasks without differential privacy, although there is a budget or a unit, or the device has "
        "made private submissions. What they reveal is not in the budget.",
    ),
    setting(
        "--second-operator",
        type=_public_key,
        metavar="HEX",
        help="`sign_key` of the second operator, from its operator.toml: refuses tasks without it. Without this option,"
        " tasks with a second operator are refused. Needs --max-epsilon.",
    ),
    setting(
        "--min-devices",
        type=click.IntRange(2, MAX_SUMMED),
        help="Devices in a sum before the second operator may open this device's part  [default: the task's]",
    ),
    setting(
        "--pin-backbone",
        multiple=True,
        type=_digest,
        metavar="HEX",
        help="Accept only tasks whose backbones have this sha256; may be repeated.",
    ),
    setting(
        "--variable-time",
        is_flag=True,
        help="Accept backbones whose work depends on images under differential privacy: the time of uploads can then "
        "reveal images.",
    ),
    setting(
        "--max-images",
        type=COUNT,
        help="Files that count under differential privacy: more are chosen by a keyed hash. Doubles the noise, since a "
        "file can displace another one.",
    ),
    setting(
        "--upload-period-s",
        type=click.FloatRange(0, min_open=True),
        help="Seconds from the start of a private build to its upload, whatever it took, and between two: has to hold "
        "the slowest build  [default: upload at once, which shows how long a build took]",
    ),
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
    from edge_client.store.device_state import DeviceState
    from protocol.storage.state_folder import default_state_folder

    if not is_name(fleet):
        expected = "1 to 64 letters, digits, '-' or '_'"
        raise click.BadParameter(f"{fleet!r}: expected {expected}", param_hint="--fleet")
    return DeviceState(state or default_state_folder(f"protofleet/{fleet}"), **options)


def as_json_text(value: dict[str, Any], *, indent: int | None = None) -> str:
    """Return JSON, with null for NaN and infinity, which it lacks."""
    plain_values = json.loads(json.dumps(value, default=bytes.hex), parse_constant=lambda _: None)
    return json.dumps(plain_values, indent=indent, allow_nan=False)
