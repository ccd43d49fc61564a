"""`aggregator init` and `aggregator check`: a task file, written and checked."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aggregator import EXTRAS
from protocol.class_folders import class_folders
from protocol.cli import counted, examples, require_packages, say
from protocol.errors import ConfigError, ProtofleetError

if TYPE_CHECKING:
    from aggregator.config.privacy import PrivacyBudget, PrivacySettings, SumsSettings
    from aggregator.config.schema import TaskFile

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(
    "init",
    epilog=examples(
        "aggregator init",
        "aggregator init task.toml --fleet orchard --images /srv/images --backbone backbone.onnx --quorum 8",
    ),
)
@click.argument("task", type=_FILE, default=Path("task.toml"))
@click.option("--fleet", help="Name of the fleet.")
@click.option("--class", "classes", multiple=True, metavar="NAME", help="Name of a class; repeatable.")
@click.option(
    "--images",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder whose sub-folders name the classes, as on a device.",
)
@click.option(
    "--backbone", "backbones", multiple=True, type=_FILE,
    help="ONNX file written by export-backbone; repeatable.",
)  # fmt: skip
@click.option(
    "--algorithm",
    help="Such as statistics or hierarchical; docs/which-algorithm.md compares them.  [default: fedtc]",
)
@click.option(
    "--quorum", type=click.IntRange(min=1), help="Devices that the first head, or each round, waits for."
)
@click.option(
    "--deadline-s", type=click.FloatRange(min=0, min_open=True), default=600.0, show_default=True,
    help="Seconds after the first submission at which it no longer waits.",
)  # fmt: skip
@click.option(
    "--private",
    is_flag=True,
    help="Differential privacy, and a second operator. Beside TASK is public.map, of `protofleet public-map`.",
)
@click.option(
    "--second-operator",
    "operator",
    type=_FILE,
    help="With --private: the file that the second operator has made with `protofleet-sums new-task`.  "
    "[default: operator.toml beside TASK]",
)
def init_command(  # noqa: PLR0913 - every option of the command line
    *, task: Path, fleet: str | None, classes: tuple[str, ...], images: Path | None, backbones: tuple[Path, ...],
    algorithm: str | None, quorum: int | None, deadline_s: float, private: bool,
    operator: Path | None,
) -> None:  # fmt: skip
    """Write a commented task file TASK (default: task.toml), and check it.

    On a terminal, asks for what is not given.
    """
    require_packages("onnxruntime", extras=EXTRAS)
    from aggregator.algorithms.registry import known_algorithms
    from aggregator.config.template import task_text

    if task.exists():
        raise ConfigError(f"{task} exists already: delete it, or give another name")
    if images is not None:
        classes = (*classes, *_folders(images))
    ask = _Questions(is_asked=_is_terminal())
    fleet = fleet or ask("Name of the fleet", default="default")
    classes = classes or ask.names(
        "Classes, separated by commas, or a folder with one sub-folder per class", "--class"
    )
    found = sorted(map(str, task.parent.glob("**/*.onnx"))) if not backbones and ask.is_asked else []
    backbones = backbones or tuple(
        map(
            Path,
            ask.names(
                "Backbones (ONNX files), separated by commas", "--backbone", default=",".join(found[:1])
            ),
        )
    )
    if operator is not None and not private:
        raise click.UsageError("--second-operator needs --private")
    if private:
        if algorithm not in (None, "statistics"):
            raise click.UsageError("--private needs statistics: remove --algorithm")
        algorithm = "statistics"
        operator = operator or Path(
            ask(
                "Second operator: the file that `protofleet-sums new-task` has made there",
                default=str(task.parent / "operator.toml"),
                kind=click.Path(exists=True, dir_okay=False),
            )
        )
        quorum = quorum or ask("Devices in a sum, at least", default=10, kind=click.IntRange(min=2))
    algorithm = algorithm or ask("Algorithm", default="fedtc", kind=click.Choice(known_algorithms()))
    if algorithm not in known_algorithms():
        raise click.BadParameter(f"expected one of {', '.join(known_algorithms())}", param_hint="--algorithm")
    quorum = quorum or ask("Devices that the first head waits for", default=1, kind=click.IntRange(min=1))
    text = task_text(
        fleet=fleet, classes=classes, backbones=[_from(task.parent, path) for path in backbones], algorithm=algorithm,
        quorum=quorum, deadline_s=deadline_s, operator=_from(task.parent, operator) if operator else "",
    )  # fmt: skip
    try:
        with task.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {task}: {error.strerror}") from error
    say(f"wrote {task}")
    try:
        _check(task)
    except ProtofleetError as error:
        raise ConfigError(f"{error}; correct it there, then run: aggregator check {task}") from error
    say(f"start the aggregator with: aggregator run --task {task}")


@click.command("check", epilog=examples("aggregator check task.toml"))
@click.argument("task", type=_FILE)
def check_command(*, task: Path) -> None:
    """Check the task file TASK and its backbones, and show what it defines."""
    require_packages("onnxruntime", extras=EXTRAS)
    _check(task)


def _check(path: Path) -> None:
    from aggregator.algorithms.statistics.feature_map import selected
    from aggregator.config.task_file import load_task
    from aggregator.tasks.task_preparation import checked_backbone, selected_columns

    task, files = load_task(path)
    described = {file: checked_backbone(file) for file in files}
    for file, metadata in described.items():
        spec = metadata.preprocessing
        say(f"backbone   {file}: {metadata.feature_size} features of images at {spec.width}x{spec.height}")
    columns = selected_columns(task.layers or (), described)
    size = len(selected(columns, sum(each.feature_size for each in described.values())))
    classes = counted(len(task.classes), "class", "classes")
    say(f"task       fleet {task.fleet}, {task.algorithm}, {classes}, {size} features")
    for note in (*_notes(task), *_time(task, files)):
        say(f"note       {note}")
    say(f"{path} is valid")


def _parties(sums: "SumsSettings", privacy: "PrivacySettings") -> tuple[str, ...]:
    """Return what each party of a task with a second operator sees and has to do."""
    from aggregator.tasks.task_preparation import read_card

    card = read_card(sums)
    return (
        "devices upload masked sums, once for a task, sealed to you; images and single features stay on them",
        f"you see sums of {sums.min_devices} devices and more; the second operator opens them, and sees no sum",
        "the epsilons of the task file are conditional: they hold only if the second operator is honest",
        "you and the second operator together could see each device's sums: be different organisations",
        f"a submission has a local epsilon of {privacy.local_epsilon:.1f} to both; limit: --max-local-epsilon",
        f"owners give --second-operator {card.sign_key} to edge-client, once the second operator has confirmed it",
        f"when the task is over, the second operator deletes its key: protofleet-sums end-task {card.seal_key[:16]}",
        "each task needs a new file of the second operator, also if one setting changes after a sum was opened",
        "the second operator gives --devices to protofleet-sums: otherwise you could invent devices",
        f"devices that submit after a sum wait for {sums.min_devices} others: let quorum be all that you expect",
        "no quarantine by content, limits of devices, `aggregator forget` and forecasts: they need single submissions",
    )


def _unit(budget: "PrivacyBudget") -> Iterator[str]:
    """Yield what the privacy loss is about, and what owners of devices state by taking part."""
    from protocol.statistics.noisy_sums import unit_in_words

    most = budget.images_per_person
    yield f"epsilon is the privacy loss of {unit_in_words(most)}, on one device"
    if most is None:
        yield "a person on several images has a greater one: privacy.dp.unit (docs/data-protection.md)"
        return
    level = f", or folder {budget.person_level} of its path" if budget.person_level else ""
    yield (
        f"a device's list of images names persons in its column `person`{level}; images without a person all count: "
        f"their owner states that nobody is on more than {most}"
    )
    if most > 1:
        yield f"the noise is that of {most} images: the same accuracy needs about {most} times the images of 1"


def _time(task: "TaskFile", backbones: Sequence[Path]) -> Iterator[str]:
    """Yield what time tells about images under differential privacy, and which backbones devices refuse for it."""
    if task.privacy.dp is None:
        return
    from protocol.models.slots import mapped
    from protocol.models.steady_operators import unsteady_operators

    for file in backbones:
        if operators := unsteady_operators(mapped(file)):
            yield (
                f"devices refuse {file}: its work depends on images ({', '.join(operators)}): use another backbone; "
                "where an owner allows it (--variable-time), time can reveal single images"
            )
    yield (
        "the time of an upload shows how long its build took: owners give --upload-period-s to edge-client to hide it"
    )


def _notes(task: "TaskFile") -> list[str]:
    """Return what a new operator may not expect of valid settings."""
    from aggregator.algorithms.registry import ALGORITHMS, distributions
    from aggregator.config.task_file import class_name_notes
    from aggregator.config.training_packages import INSTALL, missing_packages
    from protocol.statistics.noisy_sums import ENOUGH, hidden_images

    notes = class_name_notes(task.classes)
    if reason := missing_packages(task):
        notes.append(f"{reason}, which this machine lacks: {INSTALL}")
    if task.fleet != "default":
        notes.append(f"devices need --fleet {task.fleet}, or an enrollment, which contains it")
    if task.algorithm in ALGORITHMS and (others := distributions(task.algorithm)):
        notes.append(f"{task.algorithm} is protofleet's, not that of {others}, which needs another name")
    if task.quorum == 1:
        notes.append("quorum is 1: the first head, or each round, is made as soon as one device has uploaded")
    if task.devices is not None and task.quorum > len(task.devices):
        notes.append(f"quorum is more than the {len(task.devices)} devices: deadline_s decides")
    if (sums := task.privacy.sums) is not None:
        notes += _parties(sums, task.privacy)
    if len(task.classes) == 1:
        notes.append("there is one class: every image will be classified as it")
    if (budget := task.privacy.dp) is not None:
        shares = task.quorum / (1 if sums is None else sums.honest)
        hidden = hidden_images(budget.noise_multiplier, devices=shares)
        notes += _unit(budget)
        notes.append(
            f"the noise of {counted(task.quorum, 'device')} hides {counted(hidden, 'image')} of a class: below that "
            f"the head can miss it, and below about {ENOUGH * hidden} of each class it is poor (docs/privacy.md)"
        )
    elif task.client.min_images == 1:
        notes.append("client.min_images is 1: the feature of a single image may leave a device")
    return notes


def _is_terminal() -> bool:
    return sys.stdin.isatty()


class _Questions:
    """Asks on a terminal; elsewhere uses defaults."""

    def __init__(self, *, is_asked: bool) -> None:
        self.is_asked = is_asked

    def __call__(self, text: str, *, default: Any, kind: Any = None) -> Any:
        return click.prompt(text, default=default, type=kind) if self.is_asked else default

    def names(self, text: str, option: str, default: str = "") -> tuple[str, ...]:
        """Return names separated by commas, or those of a folder's sub-folders.

        Raises:
            UsageError: there is no terminal.
        """
        if not self.is_asked:
            raise click.UsageError(f"missing {option}" + (" or --images" if option == "--class" else ""))
        answer = click.prompt(text, default=default or None).strip()
        if option == "--class" and Path(answer).is_dir():
            return _folders(Path(answer))
        return tuple(filter(None, (name.strip() for name in answer.split(","))))


def _folders(images: Path) -> tuple[str, ...]:
    names = [each.name for each in class_folders(images)] if images.is_dir() else []
    if not names:
        raise ConfigError(f"no folder in {images}: expected one sub-folder per class")
    return tuple(names)


def _from(folder: Path, path: Path) -> str:
    """Return a path as a task file in the folder names it."""
    whole = path.resolve()
    return str(whole.relative_to(folder.resolve()) if whole.is_relative_to(folder.resolve()) else whole)


COMMANDS = (init_command, check_command)
