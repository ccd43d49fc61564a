"""`python -m research rare-class`: heads of a fleet in which an attacker has a class of its own."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import click
import numpy as np

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import recipe_of
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.config.schema import Robust
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.outlier_detection import judge
from aggregator.training.robust.outlier_statistics import summaries
from aggregator.training.robust.training_set import combine, pool
from benchmarks.data.images import NAMES
from benchmarks.fleets import Settings, fleet_prototypes
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import parse_partition
from research.poisoning.data_options import DataOptions, data_options

BATCH = 5

ATTACKS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "none": (0, 0),
        "scatter": (10, 2 * BATCH - 1),
        "much scatter": (100, 2 * BATCH - 1),
        "middle": (1, 2),
        "copy": (1, 2),
        "large copy": (10, BATCH),
        "five classes": (1, 2),
        "large five classes": (10, BATCH),
    }
)
"""Prototypes of the class, and images in each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One fleet."""

    attack: str
    seed: int
    unlimited: float
    """Accuracy on images of the other classes, if the class counted like any other."""
    accuracy: float
    """The same, of the head as it is made."""
    taken: float
    """Share of these that is predicted to be of the rare class."""
    is_quarantined: bool


@click.command("rare-class")
@data_options(names=NAMES, images=2_000)
@click.option("--clients", type=click.IntRange(min=2), default=10, show_default=True)
@click.option(
    "--adapter/--no-adapter", default=False, show_default=True, help="Or only linear discriminants."
)
@repeated("--seed", "seeds", type=int, default=(0, 1))
@json_option
def command(
    *,
    source: DataOptions,
    clients: int,
    adapter: bool,
    seeds: tuple[int, ...],
    json_file: Path | None,
) -> None:
    """Measure what one device can do with a class that no other device has."""
    recipe = dataclasses.replace(recipe_of(Training()), adapter=adapter)
    settings = Settings(
        clients=clients, alpha=0.99, batch_size=BATCH, prototypes="batches", recipe=recipe, device="cpu"
    )
    features = source.load()
    columns = {
        "its class": "<18",
        "unlimited": ">10.1%",
        "accuracy": ">9.1%",
        "taken": ">7.1%",
        "quarantined": ">12",
    }
    table = Table(columns, title=source.title(clients))
    results: list[Result] = []
    for attack in ATTACKS:
        runs = [run(features, settings, attack=attack, seed=seed) for seed in seeds]
        results += runs
        shown = ("unlimited", "accuracy", "taken")
        means = (float(np.mean([getattr(one, name) for one in runs])) for name in shown)
        table.row(attack, *means, f"{sum(one.is_quarantined for one in runs)} of {len(runs)}")
    write_json(json_file, "rare-class", data=source.data, runs=[dataclasses.asdict(one) for one in results])


def run(features: Features, settings: Settings, *, attack: str, seed: int) -> Result:
    """Train the head of a fleet whose first device has one class more, and evaluate it on the other classes."""
    classes = features.classes
    parts = fleet_prototypes(features, parse_partition("dirichlet:100"), settings, seed=seed)
    if attack != "none":
        parts["0"] = pool([parts["0"], rare_class(attack, parts, classes=classes)])
    names = [str(label) for label in range(classes + 1)]
    rate = Robust().false_alarm_rate
    quarantined = judge(summaries(parts), classes=names, false_alarm_rate=rate).quarantined
    used = [part for device, part in parts.items() if device not in quarantined]
    data = combine(used, num_classes=classes + 1)
    unlimited, found = (
        logits_of(
            train_head(
                dataclasses.replace(data, common=common), settings.recipe, seed=seed, device="cpu"
            ).layers,
            features.test,
        ).argmax(axis=1)
        for common in (None, data.common)
    )
    return Result(
        attack=attack,
        seed=seed,
        unlimited=float((unlimited == features.test_labels).mean()),
        accuracy=float((found == features.test_labels).mean()),
        taken=float((found == classes).mean()),
        is_quarantined="0" in quarantined,
    )


def rare_class(attack: str, parts: Mapping[str, Prototypes], *, classes: int) -> Prototypes:
    """Return false prototypes of a class that no device has, of ordinary lengths."""
    rows, images = ATTACKS[attack]
    data = pool(list(parts.values()))
    means = np.stack([data.values[data.labels == label].mean(axis=0) for label in range(classes)])
    if "scatter" in attack:
        # Along what distinguishes each class from the next, back and forth.
        steps = np.concatenate([np.diff(means, axis=0), -np.diff(means, axis=0)])
        steps *= np.median(np.linalg.norm(data.values, axis=1)) / np.linalg.norm(steps, axis=1, keepdims=True)
        values = np.resize(steps, (rows, means.shape[1]))
    else:
        middle = means.mean(axis=0)
        away = means - middle
        mean = {"middle": middle, "copy": means[0]}.get(
            attack.removeprefix("large "), middle + away[::2].sum(axis=0) / 2
        )
        values = np.tile(mean, (rows, 1))
    return Prototypes(values.astype(np.float32), np.full(rows, classes), np.full(rows, images))
