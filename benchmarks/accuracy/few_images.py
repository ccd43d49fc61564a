"""`python -m benchmarks accuracy few`: heads of fleets with few images, beside simpler classifiers."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import pairwise_distances_argmin

from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.training_set import pool
from benchmarks.data.features import BackboneType, load_features
from benchmarks.data.images import NAMES, PACS
from benchmarks.fleets import calibration_error
from benchmarks.options import repeated
from benchmarks.report import Plot, Table, json_option, write_json
from protofleet.prototypes import average_class
from protofleet.simulation.fleet import Features

DEVICES = 4
BATCH_SIZE = 5
RATIO = 4
"""Images of every second class for one of the others, where classes are not balanced."""

COLUMNS = {
    "data": "<16", "classes": ">8", "images": ">8", "rare": ">6", "prototypes": ">12", "head": ">8.1%", "ECE": ">7.1%",
    "nearest mean": ">14.1%", "LDA": ">8.1%", "logistic, all features": ">24.1%",
}  # fmt: skip


Run = dict[str, Any]
"""Of a seed: accuracies on the test images, and the head's expected calibration error in 15 bins."""


@click.command("few")
@repeated(
    "--data", "names", type=click.Choice([*NAMES, *PACS]), default=("fashion_mnist", "cifar10", "pacs_photo"),
    help="May be repeated.",
)  # fmt: skip
@click.option("--backbone", type=BackboneType(), default="mobilenetv2_100", show_default=True)
@click.option("--image-size", type=click.IntRange(min=32), default=96, show_default=True)
@repeated(
    "--images", "sizes", type=click.IntRange(min=1), default=(2, 5, 10, 20, 50, 100, 500),
    help="Images of a class; may be repeated.",
)  # fmt: skip
@repeated("--seed", "seeds", type=int, default=(0, 1, 2), help="May be repeated.")
@json_option
def command(
    *,
    names: tuple[str, ...],
    backbone: str,
    image_size: int,
    sizes: tuple[int, ...],
    seeds: tuple[int, ...],
    json_file: Path | None,
) -> None:
    """Compare heads of fleets that have few images with simpler classifiers."""
    table = Table(
        COLUMNS, title=f"{backbone} at {image_size}x{image_size}, {DEVICES} devices, B {BATCH_SIZE}"
    )
    runs = []
    for name in names:
        features = load_features(name, backbone=backbone, image_size=image_size)
        for classes in (2, features.classes):
            part = _first(features, classes)
            available = int(np.bincount(part.train_labels).min())
            for size in (size for size in sizes if size <= available):
                for rare in (size, max(size // RATIO, 1)):
                    made = [_run(part, name, size, rare, seed) for seed in seeds]
                    runs += made
                    table.row(name, classes, size, rare, *_means(made))
    write_json(
        json_file,
        "few",
        tables=[table],
        plots=[_plot(runs)],
        backbone=backbone,
        image_size=image_size,
        runs=runs,
    )


def _plot(runs: Sequence[Run]) -> Plot:
    """Return the head's mean accuracy by the images of each class, where all classes have as many."""
    series: dict[str, list[tuple[float, float]]] = {}
    even = [run for run in runs if run["rare"] == run["images"]]
    for (name, classes, size), found in groupby(even, key=itemgetter("data", "classes", "images")):
        accuracy = float(np.mean([run["head"] for run in found]))
        series.setdefault(f"{name}, {classes} classes", []).append((size, accuracy))
    x, y = "images of each class in the fleet", "accuracy"
    return Plot(title="Accuracy by images", x=x, y=y, series=series, log=("x",))


def _first(features: Features, classes: int) -> Features:
    """Return the images of the first classes."""
    train, test = features.train_labels < classes, features.test_labels < classes
    return replace(
        features,
        train=features.train[train],
        train_labels=features.train_labels[train],
        test=features.test[test],
        test_labels=features.test_labels[test],
    )


def _run(features: Features, name: str, size: int, rare: int, seed: int) -> Run:
    rng = np.random.default_rng(seed)
    wanted = [rare if label % 2 else size for label in range(features.classes)]
    drawn = [
        rng.permutation(np.flatnonzero(features.train_labels == label))[:count]
        for label, count in enumerate(wanted)
    ]
    parts = pool(list(prototypes_of(features.train, drawn, rng)))
    restored = TrainingSet(parts.values, parts.labels, parts.counts, features.classes, restore=True)
    trained = train_head(restored, RECIPES["default"], seed=seed, device="cpu")
    chosen = np.concatenate(drawn)
    logits, truth = logits_of(trained.layers, features.test), features.test_labels
    logistic = LogisticRegression(max_iter=1000).fit(features.train[chosen], features.train_labels[chosen])
    lda = float("nan")
    if len(parts.labels) > features.classes:
        model = LinearDiscriminantAnalysis(
            solver="lsqr", shrinkage="auto", priors=np.full(features.classes, 1 / features.classes)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of classes with a single prototype
            lda = model.fit(restored.features, parts.labels).score(features.test, truth)
    nearest_mean = pairwise_distances_argmin(features.test, restored.centers)
    return {
        "data": name,
        "classes": features.classes,
        "images": size,
        "rare": rare,
        "seed": seed,
        "prototypes": len(parts.labels),
        "head": float((logits.argmax(axis=1) == truth).mean()),
        "calibration_error": calibration_error(logits, truth),
        "nearest_mean": float((nearest_mean == truth).mean()),
        "lda": float(lda),
        "logistic": float(logistic.score(features.test, truth)),
        "epochs": trained.epochs,
    }


def prototypes_of(
    train: NDArray[np.float32], drawn: list[NDArray[np.int64]], rng: np.random.Generator
) -> Iterator[Prototypes]:
    """Yield each device's prototypes of each class."""
    for label, images in enumerate(drawn):
        for share in np.array_split(images, DEVICES):
            if len(share):
                values, counts = average_class(train[share], batch=BATCH_SIZE, rng=rng, min_images=1)
                yield Prototypes(values, np.full(len(counts), label), counts.astype(np.int64))


def _means(runs: list[Run]) -> tuple[float, ...]:
    """Return the means over the seeds of the table's last columns."""
    names = ("prototypes", "head", "calibration_error", "nearest_mean", "lda", "logistic")
    prototypes, *rest = (float(np.mean([run[name] for run in runs])) for name in names)
    return round(prototypes), *rest
