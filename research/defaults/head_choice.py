"""`python -m research head-choice`: FedTC's closed form and adapter by the size of the fleet, and which is chosen."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.head import Dense, logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES, Recipe
from aggregator.algorithms.fedtc.train_head import FOLDS
from benchmarks.data.features import load_features
from benchmarks.fleets import Result, Settings, train_clients
from benchmarks.options import selected
from benchmarks.report import Table, json_option, write_json
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import parse_partition, share_out


class Case(NamedTuple):
    """A fleet: its data, its images together, and how devices share them."""

    data: str
    layers: str
    images: int
    image_size: int = 96
    at_most: int | None = 20_000
    devices: int = 10
    partition: str = "dirichlet:0.1"
    incorrect: float = 0.0
    """Share of the images with a random label."""
    tail: float = 1.0
    """Times as many images as the rarest class that the most frequent class has."""


HIDDEN = "c384,c576"

CASES = {
    "pacs": Case("pacs", "c576,c960", 560, 224, None),
    "pacs, few": Case("pacs", "c576,c960", 280, 224, None),
    "mnist": Case("mnist", HIDDEN, 600, at_most=2_000, devices=4, partition="dirichlet:0.5"),
    "usps": Case("usps", HIDDEN, 600, at_most=2_000, devices=4, partition="dirichlet:0.5"),
    **{
        f"{data}, {images}": Case(data, HIDDEN, images)
        for images in (500, 1_000, 2_000, 4_000, 6_000, 20_000)
        for data in ("fashion_mnist", "cifar10")
    },
    "residual": Case("fashion_mnist", "residual", 20_000),
    "one device": Case("cifar10", HIDDEN, 4_000, devices=1, partition="iid"),
    "two devices": Case("cifar10", HIDDEN, 4_000, devices=2, partition="dirichlet:0.5"),
    "even": Case("cifar10", HIDDEN, 4_000, partition="iid"),
    "a fifth incorrect": Case("cifar10", HIDDEN, 4_000, incorrect=0.2),
    "long tail": Case("cifar10", HIDDEN, 8_000, tail=10.0),
}

DEFAULT = RECIPES["default"]
CLOSED_FORM, ADAPTER = replace(DEFAULT, adapter=False), replace(DEFAULT, closed_form=False)

HELD_OUT = 2_000
"""Training images that no device has, to choose constants with."""

COLUMNS = {
    "fleet": "<20", "seed": ">6", "prototypes": ">12", "of a class": ">12.0f", "closed form": ">13.1%",
    "adapter": ">9.1%", "chosen": ">13", "top-1": ">8.1%", "ECE": ">7.1%", "s": ">7.1f",
}  # fmt: skip


@click.command("head-choice")
@selected("--case", "names", choices=CASES)
@click.option("--seed", "seeds", type=int, default=(0, 1, 2), multiple=True, show_default=True)
@click.option("--validation", is_flag=True, help="Evaluate on training images that no device has.")
@click.option(
    "--leave-out", is_flag=True, help="Evaluate on the images of devices left out, a fifth at a time."
)
@json_option
def command(
    *,
    names: tuple[str, ...],
    seeds: tuple[int, ...],
    validation: bool,
    leave_out: bool,
    json_file: Path | None,
) -> None:
    """Train both heads on simulated fleets; print their accuracy, and that of the head which `fedtc` chooses.

    Nothing limits what a device counts. Seconds are those of the choice, the temperature and the head. With
    --leave-out, both heads are trained without the devices, and each class counts alike.
    """
    table, runs = Table(COLUMNS, title="mobilenetv2_100, B 5"), []
    for name in names:
        for seed in seeds:
            run = (
                _left_out(CASES[name], seed) if leave_out else _run(CASES[name], seed, validation=validation)
            )
            table.row(name, seed, *run.values())
            runs.append({"case": name, "seed": seed, **run})
    write_json(json_file, "head-choice", tables=[table], runs=runs)


def _fleet(case: Case, seed: int, *, validation: bool = False) -> tuple[Features, NDArray[np.int64]]:
    """Return a fleet's features, and the device of each image for training (n,)."""
    features = load_features(
        case.data,
        backbone=f"mobilenetv2_100:{case.layers}",
        image_size=case.image_size,
        at_most=case.at_most,
    )
    rng, labels = np.random.default_rng((seed, 1)), features.train_labels.copy()
    order = rng.permutation(len(labels))
    rows, others = order[: case.images], order[case.images :][:HELD_OUT]
    if validation:
        if not len(others):
            raise click.UsageError(f"{case.data} has no images beside the {case.images} of the devices")
        features = replace(features, test=features.train[others], test_labels=labels[others])
    kept = np.concatenate([
        members[: round(len(members) * case.tail ** (-number / (features.classes - 1)))]
        for number, label in enumerate(rng.permutation(features.classes))
        for members in [rows[labels[rows] == label]]
    ])  # fmt: skip
    swapped = kept[rng.random(len(kept)) < case.incorrect]
    labels[swapped] = rng.integers(features.classes, size=len(swapped))
    kept.sort()
    fleet_rng = np.random.default_rng(seed)
    owners = share_out(labels[kept], parse_partition(case.partition), clients=case.devices, rng=fleet_rng)
    return replace(features, train=features.train[kept], train_labels=labels[kept]), owners


def _head(
    features: Features, owners: NDArray[np.int64], recipe: Recipe, seed: int
) -> tuple[Result, Sequence[Dense]]:
    settings = Settings(max_multiple=0, prototypes="batches", recipe=recipe)
    return train_clients(features, owners, settings, seed=seed)


def _run(case: Case, seed: int, *, validation: bool) -> dict[str, Any]:
    """Return the figures of a row of the table."""
    features, owners = _fleet(case, seed, validation=validation)
    chosen, closed = (_head(features, owners, recipe, seed)[0] for recipe in (DEFAULT, CLOSED_FORM))
    adapter = chosen if chosen.epochs else _head(features, owners, ADAPTER, seed)[0]
    return {
        "prototypes": chosen.prototypes,
        "of a class": chosen.prototypes / features.classes,
        "closed form": closed.accuracy,
        "adapter": adapter.accuracy,
        "chosen": "adapter" if chosen.epochs else "closed form",
        "top-1": chosen.accuracy,
        "ECE": chosen.calibration_error,
        "s": chosen.train_seconds,
    }


def _left_out(case: Case, seed: int) -> dict[str, Any]:
    """Return the same figures on the images of devices that are left out, without those of a choice."""
    features, owners = _fleet(case, seed)
    groups = np.random.default_rng(seed).permutation(case.devices) % FOLDS
    correct: dict[str, NDArray[np.bool_]] = {
        name: np.zeros(len(owners), np.bool_) for name in ("closed form", "adapter")
    }
    prototypes = []
    for group in np.unique(groups):
        out = groups[owners] == group
        rest = replace(
            features,
            train=features.train[~out],
            train_labels=features.train_labels[~out],
            test=features.train[out],
            test_labels=features.train_labels[out],
        )
        for name, recipe in {"closed form": CLOSED_FORM, "adapter": ADAPTER}.items():
            result, layers = _head(rest, owners[~out], recipe, seed)
            correct[name][out] = logits_of(layers, rest.test).argmax(axis=1) == rest.test_labels
        prototypes.append(result.prototypes)
    labels = features.train_labels
    by_class = {
        name: float(np.mean([rows[labels == label].mean() for label in np.unique(labels)]))
        for name, rows in correct.items()
    }
    mean = float(np.mean(prototypes))
    figures = {"prototypes": round(mean), "of a class": mean / features.classes, **by_class}
    return figures | dict.fromkeys(("chosen", "top-1", "ECE", "s"))
