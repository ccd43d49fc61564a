"""`python -m research forecast`: whether twice as many images bring what the status promises."""

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.status.forecast import gain
from aggregator.training.robust.training_set import pool
from benchmarks.accuracy.few_images import prototypes_of
from benchmarks.data.features import load_features
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from protofleet.simulation.fleet import Features

SETS = {
    "pacs_photo": 224, "pacs_art_painting": 224, "pacs_cartoon": 224, "pacs_sketch": 224, "fashion_mnist": 96,
    "cifar10": 96, "mnist": 96,
}  # fmt: skip
"""Sets with the image size."""

SIZES = (5, 10, 20, 40, 80)
"""Images of a class, before they are doubled."""

COLUMNS = {
    "data": "<18", "images": ">6", "errors": ">8.1%", "doubled": ">8.1%", "left": ">6.0%", "least": ">7.1%",
    "most": ">7.1%", "right": ">7.0%",
}  # fmt: skip


@click.command("forecast")
@repeated("--data", "names", type=click.Choice(list(SETS)), default=tuple(SETS), help="May be repeated.")
@repeated("--seed", "seeds", type=int, default=tuple(range(10)), help="May be repeated.")
@json_option
def command(*, names: tuple[str, ...], seeds: tuple[int, ...], json_file: Path | None) -> None:
    """Compare the forecast of a head, by a fifth of its images that is held out, with the gain on test images."""
    table, runs = Table(COLUMNS, title="mobilenetv2_100:last,residual, B 5"), []
    for name in names:
        features = load_features(name, backbone="mobilenetv2_100:last,residual", image_size=SETS[name])
        available = int(np.bincount(features.train_labels).min())
        for size in (size for size in SIZES if 2 * size + max(size // 4, 1) <= available):
            made = [_run(features, size, seed) for seed in seeds]
            runs += [{"data": name, "images": size, **run} for run in made]
            means = {key: float(np.mean([run[key] for run in made])) for key in made[0]}
            figures = (means["errors"], means["doubled"], means["doubled"] / means["errors"])
            table.row(name, size, *figures, means["least"], means["most"], means["is_right"])
    right = float(np.mean([run["is_right"] for run in runs]))
    click.echo(f"{right:.1%} of {len(runs)} forecasts are right")
    write_json(json_file, "forecast", tables=[table], runs=runs)


def _run(features: Features, size: int, seed: int) -> dict[str, float]:
    """Return the shares of errors of a head and of one of twice as many images, and the forecast."""
    rng, labels = np.random.default_rng(seed), features.train_labels
    drawn = [rng.permutation(np.flatnonzero(labels == label)) for label in range(features.classes)]
    held_out = np.concatenate([rows[2 * size : 2 * size + max(size // 4, 1)] for rows in drawn])
    errors = []
    for many in (size, 2 * size):
        wrong = _errors(features, [rows[:many] for rows in drawn], seed, held_out)
        errors.append(wrong)
    (test, known), (doubled, _) = errors
    least, most = gain(int((~known).sum()), int(known.sum())) or (0.0, 0.0)
    gained = float(test.mean() - doubled.mean())
    return {
        "errors": float(test.mean()),
        "doubled": float(doubled.mean()),
        "least": least,
        "most": most,
        "is_right": float(least <= gained <= most),
    }


def _errors(
    features: Features, drawn: Sequence[NDArray[np.int64]], seed: int, held_out: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which test and held-out images a head misclassifies that is trained on the drawn images."""
    parts = pool(list(prototypes_of(features.train, list(drawn), np.random.default_rng(seed))))
    data = TrainingSet(parts.values, parts.labels, parts.counts, features.classes, restore=True)
    layers = train_head(data, RECIPES["default"], seed=seed, device="cpu").layers
    sets = (
        (features.test, features.test_labels),
        (features.train[held_out], features.train_labels[held_out]),
    )
    test, known = (logits_of(layers, rows).argmax(axis=1) != truth for rows, truth in sets)
    return test, known
