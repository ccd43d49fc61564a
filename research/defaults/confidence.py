"""`python -m research confidence`: the calibration error of FedTC's head, before and after its calibration."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.confidence import calibrated, fit_map
from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import recipe_of
from benchmarks.data.features import load_features
from benchmarks.data.images import NAMES
from benchmarks.fleets import Settings, calibration_error, train_fleet
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from protocol.statistics.confidence import confidence_bins
from protocol.wire.messages import CONFIDENCE_BINS
from protofleet.simulation.fleet import Features
from research.defaults.class_prior import UNEVEN, probabilities_of, run_places

DRAWS, PLACES = 8, 60
"""Draws of held-out images for each head, and places with the class prior."""

COLUMNS = {
    "data": "<14", "held out": ">9", "ECE": ">7.1%", "worst": ">7.1%", "worse": ">7.0%", "log loss": ">9.3f",
    "with prior": ">11.1%",
}  # fmt: skip

Figures = tuple[float, float, float]
"""Calibration error, mean cross-entropy, and accuracy at places with the class prior that they estimate."""


@click.command("confidence")
@repeated("--data", "names", type=click.Choice(NAMES), default=("fashion_mnist", "cifar10"))
@repeated("--held-out", "sizes", type=click.IntRange(min=1), default=(20, 50, 100, 300, 1000))
@click.option("--at-most", type=click.IntRange(min=1), help="Images of the devices.  [default: all]")
@repeated("--seed", "seeds", type=int, default=(0, 1, 2), help="May be repeated.")
@json_option
def command(
    *, names: tuple[str, ...], sizes: tuple[int, ...], at_most: int | None, seeds: tuple[int, ...],
    json_file: Path | None,
) -> None:  # fmt: skip
    """Calibrate heads by held-out images of the whole fleet; ECE has 15 bins, and is of the test images."""
    runs, table = [], Table(COLUMNS, title="FedTC, mobilenetv2_100 at 96x96, ten devices, Dirichlet 0.1")
    for name in names:
        features = load_features(name, backbone="mobilenetv2_100", image_size=96)
        found: dict[int, list[list[Figures]]] = {}
        for seed in seeds:
            for size, figures in _figures(features, sizes, at_most, seed):
                found.setdefault(size, []).append(figures)
        before = [each[0][0] for each in found[0]]
        for size, of_seeds in found.items():
            errors = np.array([[each[0] for each in figures] for figures in of_seeds])
            _, loss, accuracy = np.mean([each for figures in of_seeds for each in figures], axis=0).tolist()
            worse = float((errors > np.array(before)[:, None]).mean()) if size else None
            table.row(name, size or "none", errors.mean(), errors.max(), worse, loss, accuracy)
            runs.append({"data": name, "held_out": size, "heads": of_seeds})
    write_json(json_file, "confidence", tables=[table], seeds=seeds, at_most=at_most, runs=runs)


def _figures(
    features: Features, sizes: Sequence[int], at_most: int | None, seed: int
) -> Iterator[tuple[int, list[Figures]]]:
    """Yield the figures of a head as it was trained, for 0 images, and calibrated by each number of images."""
    order = np.random.default_rng(seed).permutation(len(features.train_labels))
    held_out, rows = order[: max(sizes)], order[max(sizes) :][:at_most]
    devices = replace(features, train=features.train[rows], train_labels=features.train_labels[rows])
    settings = Settings(clients=10, alpha=0.99, batch_size=5, recipe=recipe_of(Training()), device="cpu")
    _, head = train_fleet(devices, UNEVEN, settings, seed=seed)
    logits, truth = logits_of(head, features.test), features.test_labels
    yield 0, [_measured(logits, truth, seed)]
    probabilities = probabilities_of(logits_of(head, features.train[held_out]))
    bins = confidence_bins(probabilities)
    is_correct = probabilities.argmax(axis=1) == features.train_labels[held_out]
    for size in sizes:
        made = []
        for draw in range(DRAWS):
            chosen = np.random.default_rng([seed, size, draw]).permutation(len(bins))[:size]
            correct, images = (
                np.bincount(places, minlength=CONFIDENCE_BINS).astype(np.float64)
                for places in (bins[chosen[is_correct[chosen]]], bins[chosen])
            )
            confidence = fit_map(correct, images, classes=features.classes)
            made.append(_measured(calibrated(logits, confidence), truth, seed))
        yield size, made


def _measured(logits: NDArray[np.float32], truth: NDArray[np.int64], seed: int) -> Figures:
    rows = probabilities_of(logits)
    loss = -float(np.log(np.maximum(rows[np.arange(len(rows)), truth], 1e-12)).mean())
    places = run_places(rows, truth, UNEVEN.parameter, places=PLACES, seed=seed)
    return (
        calibration_error(logits, truth),
        loss,
        float(np.mean([with_prior for _, with_prior, *_ in places])),
    )
