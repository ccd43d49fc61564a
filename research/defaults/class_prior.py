"""`python -m research prior`: accuracy of one head at many places, with and without the class prior of each place."""

from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.config.schema import Robust
from benchmarks.data.features import BackboneType, load_features
from benchmarks.data.images import NAMES
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from edge_client.heads.class_prior import adjusted, estimate
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition, share_out
from protofleet.simulation.statistics import map_features, run_fleet

TRAINED_ON = 12_000
"""Images of the ten devices whose class sums make the head."""

UNEVEN, IMAGES = Partition("dirichlet", 0.1), 100
"""Shares of their classes, and unlabeled images of a place."""

COLUMNS = {
    "data": "<14", "Dirichlet": ">9g", "no prior": ">9.1%", "estimated": ">10.1%", "true prior": ">11.1%",
    "worst change": ">13.1%", "adjusted": ">9.0%",
}  # fmt: skip

Accuracies = tuple[float, float, float, bool]
"""Without a prior, with the estimated one, with the true one, and whether the images show that classes are uneven."""


@click.command("prior")
@repeated("--data", "names", type=click.Choice(NAMES), default=("fashion_mnist", "cifar10"))
@repeated(
    "--concentration", "concentrations", type=float, default=(0.1, 0.5, 2.0, 100.0),
    help="Of the Dirichlet distribution of a place's shares of the classes; may be repeated.",
)  # fmt: skip
@click.option("--places", type=click.IntRange(min=1), default=60, show_default=True)
@click.option("--backbone", type=BackboneType(), default="mobilenetv2_100", show_default=True)
@repeated("--seed", "seeds", type=int, default=(0, 1, 2), help="May be repeated.")
@json_option
def command(
    *, names: tuple[str, ...], concentrations: tuple[float, ...], places: int, backbone: str,
    seeds: tuple[int, ...], json_file: Path | None,
) -> None:  # fmt: skip
    """Predict test images at places with unlike shares of the classes, as `edge-client predict` does in a folder."""
    runs, table = [], Table(COLUMNS, title=f"{backbone} at 96x96, {places} places of {IMAGES} images")
    for name in names:
        features = load_features(name, backbone=backbone, image_size=96, at_most=TRAINED_ON)
        heads = {seed: _probabilities(features, seed) for seed in seeds}
        for concentration in concentrations:
            found = np.array([
                each
                for seed, rows in heads.items()
                for each in run_places(rows, features.test_labels, concentration, places=places, seed=seed)
            ])  # fmt: skip
            plain, estimated, true, share = found.mean(axis=0).tolist()
            worst = float((found[:, 1] - found[:, 0]).min())
            table.row(name, concentration, plain, estimated, true, worst, share)
            runs.append({"data": name, "concentration": concentration, "places": found.tolist()})
    write_json(json_file, "prior", tables=[table], backbone=backbone, seeds=seeds, runs=runs)


def _probabilities(features: Features, seed: int) -> NDArray[np.float32]:
    """Return the class probabilities of the test images, (m, C), by the head of a fleet's class sums."""
    owners = share_out(features.train_labels, UNEVEN, clients=10, rng=np.random.default_rng(seed))
    data = map_features(features, random_features=0, seed=seed)
    robust = Robust(detect_outliers=False, max_multiple=0)
    return probabilities_of(run_fleet(data, owners, batch_size=1, seed=seed, robust=robust).logits)


def probabilities_of(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the softmax of logits (n, C)."""
    exponentials: NDArray[np.float32] = np.exp(logits - logits.max(axis=1, keepdims=True))
    exponentials /= exponentials.sum(axis=1, keepdims=True)
    return exponentials


def run_places(
    probabilities: NDArray[np.float32],
    truth: NDArray[np.int64],
    concentration: float,
    *,
    places: int,
    seed: int,
) -> Iterator[Accuracies]:
    """Yield the accuracies at each place; its images are drawn from the test images by its shares."""
    rng = np.random.default_rng([seed, places])
    members = [np.flatnonzero(truth == label) for label in range(probabilities.shape[1])]
    for _ in range(places):
        shares = rng.dirichlet(np.full(len(members), concentration))
        counts = rng.multinomial(IMAGES, shares)
        chosen = np.concatenate(
            [rng.choice(of_class, n) for of_class, n in zip(members, counts, strict=True)]
        )
        rows, labels = probabilities[chosen], truth[chosen]
        found, alike = estimate(rows), np.ones(len(members))
        plain, estimated, true = (
            float((adjusted(rows, prior).argmax(axis=1) == labels).mean())
            for prior in (alike, alike if found is None else found, shares)
        )
        yield plain, estimated, true, found is not None
