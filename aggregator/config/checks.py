"""Checks of a task file's settings against each other, and of its backbones against the disk."""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aggregator.algorithms.registry import ALGORITHMS
from aggregator.config.schema import TaskFile

Problem = tuple[tuple[str, ...], str]
"""The path of a key, and what is wrong with its value."""


def find_problems(task: TaskFile, given: Mapping[str, Any], backbones: Sequence[Path]) -> Iterator[Problem]:
    """Yield every contradiction in a task file.

    Args:
        task: the decoded file.
        given: the file as TOML values; it tells a default from a value that was written.
        backbones: the paths of the backbones.
    """
    yield from _class_names(task.classes)
    yield from _unused(task, given)
    yield from _thresholds(task)
    yield from _privacy(task, given)
    yield from _backbones(backbones)


def _class_names(classes: Sequence[str]) -> Iterator[Problem]:
    """Class names are folder names and stand in lists of images."""
    times = Counter(unicodedata.normalize("NFC", name) for name in classes)
    if repeated := sorted(name for name, count in times.items() if count > 1):
        yield ("classes",), f"classes named twice: {', '.join(repeated)}"
    for name in classes:
        if name != name.strip() or any(unicodedata.category(c) == "Cc" for c in name):
            yield ("classes",), f"{name!r} begins or ends with a space, or contains a control character"


def _unused(task: TaskFile, given: Mapping[str, Any]) -> Iterator[Problem]:
    only_rounds, only_fedtc = {"rounds"}, {"training", "retrain_after", "robust"}
    unused = {*ALGORITHMS, *(only_rounds if task.learning is None else only_fedtc)} - {task.algorithm}
    paths: list[tuple[str, ...]] = [(name,) for name in sorted(unused & given.keys())]
    if task.learning is not None:
        paths += [
            ("client", name) for name in sorted({"alpha", "batch_size"} & given.get("client", {}).keys())
        ]
    for path in paths:
        yield path, f'algorithm = "{task.algorithm}" does not use this setting: remove it'


def _thresholds(task: TaskFile) -> Iterator[Problem]:
    client, rounds = task.client, task.rounds
    if task.learning is None and client.min_images > client.batch_size:
        problem = f"{client.min_images} is more than client.batch_size ({client.batch_size})"
        yield ("client", "min_images"), f"{problem}: no prototype would have that many images"
    if task.learning is not None and rounds.min_devices > task.quorum:
        yield ("rounds", "min_devices"), f"{rounds.min_devices} is more than quorum ({task.quorum})"
    if task.devices is not None and rounds.min_devices > len(task.devices):
        yield (
            ("rounds", "min_devices"),
            f"{rounds.min_devices} is more than the {len(task.devices)} devices: no round would ever close",
        )


def _privacy(task: TaskFile, given: Mapping[str, Any]) -> Iterator[Problem]:
    perturbation, dp, algorithm = (
        task.privacy.perturbation,
        task.privacy.dp,
        f'algorithm = "{task.algorithm}"',
    )
    if perturbation and perturbation.on == "prototypes" and task.learning and task.learning.uploaded:
        yield (
            ("privacy", "perturbation", "on"),
            f'{algorithm} uploads parameters as well, which would stay unperturbed: set on = "images"',
        )
    if dp is None:
        return
    if dp.max_epsilon < dp.epsilon:
        yield (
            ("privacy", "dp", "max_epsilon"),
            f"{dp.max_epsilon:g} is less than epsilon ({dp.epsilon:g}): no device could upload anything",
        )
    if perturbation is not None:
        yield ("privacy", "perturbation"), "excludes [privacy.dp]: remove one of the two tables"
    if given.get("client", {}).get("alpha", 1) != 1:
        yield (
            ("client", "alpha"),
            "must be 1 with [privacy.dp], because whether an image is an outlier depends on other images: remove it",
        )
    if task.learning is not None:
        problem = f"{algorithm} trains a projection on a device's images, whose influence on it has no bound"
        yield ("privacy", "dp"), f'{problem}: use algorithm = "fedtc"'


def _backbones(paths: Sequence[Path]) -> Iterator[Problem]:
    for path in paths:
        if not path.is_file():
            yield ("backbones",), f"no file {path}: make it with `export-backbone MODEL --out {path.parent}`"
    if len({path.resolve() for path in paths}) < len(paths):
        yield ("backbones",), "a backbone is named twice: remove one"
