"""`edge-client init`: a settings file, with what protects people if the fleet's tasks are private."""

import json
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from edge_client.cli.options import COUNT, FOLDER, PRIVACY, backbone_option, privacy_options
from protocol.cli import examples, say
from protocol.errors import ConfigError

MAX_EPSILON = 4.0
"""Budget that is proposed: of four strong submissions, as `aggregator init --private` writes them."""

_COMMENTS = {
    "max-epsilon": "budget of all submissions together; 1 is strong, above 8 weak",
    "privacy-unit": '"person" refuses tasks that protect single images only',
    "upload-period-s": "so long after its build began an upload leaves: time does not tell of images",
}


@click.command(
    "init",
    epilog=examples(
        "edge-client init --broker broker.example --data /srv/images",
        "edge-client init edge-client.toml --enrollment shed-1 --data /srv/images --private --images 2000",
    ),
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), default=Path("edge-client.toml"))
@click.option("--broker", metavar="HOST[:PORT][,...]", help="MQTT broker of the fleet.")
@click.option("--enrollment", type=FOLDER, help="Enrollment directory, which names broker and fleet.")
@click.option("--fleet", help="Name of the fleet.")
@click.option(
    "--data", type=click.Path(path_type=Path), help="Directory or CSV file of images.  [default: data]"
)
@backbone_option
@privacy_options
@click.option(
    "--private",
    is_flag=True,
    help="Accept tasks with differential privacy only, with a budget, and upload at times that tell nothing.",
)
@click.option(
    "--images",
    type=COUNT,
    help="With --private: the most images that the device will ever have, which every build gets the time for.",
)
@click.pass_context
def init_command(
    context: click.Context, /, *, file: Path, private: bool, images: int | None, **options: Any
) -> None:
    """Write a settings file FILE (default: edge-client.toml) for `edge-client run --config FILE`.

    On a terminal, asks for what is not given.
    """
    if file.exists():
        raise ConfigError(f"{file} exists already: delete it, or give another name")
    if images is not None and not private:
        raise click.UsageError("--images needs --private")
    if options["broker"] is None and options["enrollment"] is None:
        options["broker"] = _ask("Broker of the fleet, HOST or HOST:PORT", "--broker")
    if options["data"] is None:
        options["data"] = Path(_ask("Folder of images", "--data", default="data"))
    asked = ("broker", "data")
    given = {
        name: value
        for name, value in options.items()
        if value is not None
        and (name in asked or context.get_parameter_source(name) is not ParameterSource.DEFAULT)
    }
    if private:
        given |= _proposed(given, images)
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(_text(given))
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    say(f"wrote {file}")
    say(f"start the device with: edge-client run --config {file}")


def _ask(text: str, option: str, *, default: Any = None, kind: Any = None) -> Any:
    """Return the answer on a terminal, or the default elsewhere; raises UsageError without either."""
    if sys.stdin.isatty():
        return click.prompt(text, default=default, type=kind)
    if default is None:
        raise click.UsageError(f"missing {option}")
    return default


def _proposed(given: dict[str, Any], images: int | None) -> dict[str, Any]:
    """Return the settings of privacy that were not given, and say what they mean."""
    from edge_client.privacy.upload_slots import proposed_period_s

    proposed: dict[str, Any] = {"max_epsilon": MAX_EPSILON, "privacy_unit": "image"} | given
    say(f"budget     epsilon {proposed['max_epsilon']:g} for all submissions together")
    of_images = "" if proposed["privacy_unit"] == "person" else ": --privacy-unit person refuses those"
    say(f"unit       tasks may protect one {proposed['privacy_unit']}{of_images}")
    if "upload_period_s" not in given:
        images = (
            given.get("max_images")
            or images
            or _ask("The most images that the device will ever have", "--images", kind=COUNT)
        )
        slot_s = _slot_s(given.get("backbone", ()))
        proposed["upload_period_s"] = proposed_period_s(images, slot_s)
        say(f"images     {images}, each of which may take {slot_s:.2g} s")
    say(f"uploads    {proposed['upload_period_s'] / 3600:g} h after their builds began")
    return proposed


def _slot_s(backbones: tuple[Path, ...]) -> float:
    """Return the seconds that an image may take with backbones, or with any that is quick on this machine."""
    from edge_client.graphs.backbone import open_backbone
    from edge_client.graphs.forked_runs import MIN_BUDGET_S, WALL_FACTOR
    from edge_client.graphs.session import require_runtime
    from edge_client.images.isolated_decoding import isolated_decoder
    from protocol.models.preprocessing import Preprocessing

    if backbones:
        require_runtime()
    slots_s = []
    for path in backbones:
        with open_backbone(path, provider="cpu").isolated() as isolated:
            slots_s.append(isolated.model.slot_s)
    with isolated_decoder(Preprocessing(height=224, width=224)) as decoder:
        return sum(max(slot_s, decoder.slot_s) for slot_s in slots_s or [WALL_FACTOR * MIN_BUDGET_S])


def _text(given: dict[str, Any]) -> str:
    """Return a settings file: TOML, in which JSON of a string, a number, a truth value or a list of them is valid."""
    lines = {name: _line(name, value) for name, value in given.items()}
    privacy = [line for name, line in lines.items() if name in PRIVACY]
    others = [line for name, line in lines.items() if name not in PRIVACY]
    first = "# Settings of a device: options of `edge-client run --help`, without their leading dashes.\n\n"
    return "".join([first, *others, *(["\n[privacy]\n", *privacy] if privacy else [])])


def _line(name: str, value: Any) -> str:
    key = name.replace("_", "-")
    comment = f"   # {_COMMENTS[key]}" if key in _COMMENTS else ""
    return f"{key} = {json.dumps(_plain(value), ensure_ascii=False)}{comment}\n"


def _plain(value: Any) -> Any:
    """Return a value as a settings file has it; a service has another working directory."""
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, bytes):
        return value.hex()
    return list(map(_plain, value)) if isinstance(value, tuple) else value
