"""`python -m research noisy-sums`: differential privacy on sums, beside noisy prototypes of the same features."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.statistics.moments import of_all_classes
from aggregator.algorithms.statistics.noisy_ridge import (
    NoisyTotal,
    Shortening,
    make_public_map,
    of_features,
    solve_noisy,
)
from aggregator.algorithms.statistics.ridge import solve
from aggregator.graphs.head_export import mapped
from benchmarks.data.features import load_features
from benchmarks.data.images import NAMES, PACS
from benchmarks.options import repeated
from benchmarks.report import Plot, Table, json_option, write_json
from edge_client.privacy.sum_mechanism import noisy_sums
from protocol.errors import ProtofleetError
from protocol.statistics.gaussian_privacy import noise_multiplier
from protocol.statistics.integer_rows import MAX_VALUE
from protocol.statistics.noisy_sums import epsilon_of_sums
from protocol.statistics.public_map import PublicMap
from protocol.statistics.row_sums import RowSums
from protocol.wire.codec import digest_of
from protofleet.simulation.fleet import Features
from research.privacy.noisy_prototypes import Mechanism
from research.privacy.private_fleet import DELTA, Fleet, run_private

BACKBONE, SIZE = "mobilenetv2_100:residual", 96

BATCHES = (10, 25, 100)
"""B of noisy prototypes, of which the best on the test images is shown: an advantage that users do not have."""

COLUMNS = {"data": "<14", "images": ">8,", "devices": ">8.4g", "no noise": ">9.1%"}
"""And a column for each epsilon."""

RIVAL_COLUMNS = {"data": "<14", "images": ">8,", "epsilon": ">8g", "sums": ">7.1%", "prototypes": ">11.1%"}

TEN = 10
"""Devices whose sums are compared with noisy prototypes."""


def map_of_photographs(size: int, *, at_most: int | None = None) -> PublicMap:
    """Return the public map of the images of PACS, to `size` values."""
    public = [load_features(name, backbone=BACKBONE, image_size=SIZE, at_most=at_most) for name in PACS]
    return make_public_map(
        np.concatenate([part for each in public for part in (each.train, each.test)]), size
    )


def accuracy_of_sums(
    data: Features,
    how: PublicMap,
    every_row: NDArray[np.int8],
    *,
    images: int,
    devices: float,
    epsilon: float | None,
    seed: int,
) -> float:
    """Return the accuracy of a head of sums, to which each device has added noise of its own; one device: once.

    `every_row` are the rows of all training images.

    Sums of discrete Gaussians are discrete Gaussian but for e^-88 (Kairouz, Liu and Steinke 2021, theorem 9).
    """
    chosen = drawn(data, images, seed)
    rows, labels = every_row[chosen], data.train_labels[chosen]
    if epsilon is None:
        exact = RowSums(rows.shape[1])
        for label in range(data.classes):
            exact.add(label, rows[labels == label])
        layer = solve(of_all_classes(len(rows), *exact.result(), num_classes=data.classes)).layer
    else:
        z = noise_multiplier(epsilon, DELTA, cost=epsilon_of_sums) * float(np.sqrt(devices))
        key = digest_of(f"{seed} {images} {devices:g} {epsilon}".encode())
        sums = noisy_sums(rows, labels, classes=data.classes, noise_multiplier=z, key=key)
        try:
            layer, _ = solve_noisy(NoisyTotal(**vars(sums), noise_multiplier=z))
        except ProtofleetError:  # the noise is as large as the sums
            return 1 / data.classes
    logits = of_features(layer, how).outputs(mapped(Shortening(how), data.test))
    return float((logits.argmax(axis=1) == data.test_labels).mean())


def drawn(data: Features, images: int, seed: int) -> NDArray[np.intp]:
    """Return the numbers of so many training images, equally many of each class, as far as there are."""
    random = np.random.default_rng(seed)
    every_class = [np.flatnonzero(data.train_labels == label) for label in range(data.classes)]
    return np.concatenate([random.permutation(each)[: images // data.classes] for each in every_class])


def accuracy_of_prototypes(
    data: Features, how: PublicMap, *, images: int, devices: float, epsilon: float, seed: int
) -> float:
    """Return the accuracy of FedTC on noisy prototypes of the same features, centered and clipped alike."""
    # The length that rows are shortened to, before they were scaled; `how` has all directions of the features.
    clip_norm = MAX_VALUE / float(np.linalg.norm(how.components[0]))
    centered = replace(data, train=data.train - how.center, test=data.test - how.center)
    each = images // data.classes // int(devices)
    recipe = replace(RECIPES["default"], restore=False, mix=False)
    found = []
    for batch in [batch for batch in BATCHES if 2 * batch <= each] or [max(2, each // 2)]:
        mechanism = Mechanism(
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier(epsilon, DELTA),
            batch_size=batch,
            min_images=2,
        )
        fleet = Fleet(devices=int(devices), images=each, batch=batch)
        found.append(run_private(centered, fleet, how=mechanism, recipe=recipe, seed=seed, device="cpu"))
    return max(found)


@click.command("noisy-sums")
@repeated("--data", "names", type=click.Choice(NAMES), default=("fashion_mnist", "cifar10", "mnist"))
@repeated(
    "--images",
    "sizes",
    type=int,
    default=(1000, 6000, 60_000),
    help="Of all devices, at most those that there are.",
)
@repeated(
    "--devices",
    type=float,
    default=(1, 10, 100),
    help="That add noise; 1 is noise for the fleet at once, 10/6 that of ten of which six are enough.",
)
@repeated("--epsilon", "epsilons", type=float, default=(0.5, 1.0, 2.0, 4.0, 8.0, 32.0))
@repeated("--seed", "seeds", type=int, default=(0, 1, 2))
@click.option("--size", type=int, default=371, show_default=True, help="D, the length of a row.")
@repeated("--prototypes", type=float, default=(), help="Epsilon of noisy prototypes of ten devices.")
@click.option("--at-most", type=int, help="Images of each part of a data set, for a trial.")
@json_option
def command(
    *, names: tuple[str, ...], sizes: tuple[int, ...], devices: tuple[float, ...], epsilons: tuple[float, ...],
    seeds: tuple[int, ...], size: int, prototypes: tuple[float, ...], at_most: int | None, json_file: Path | None,
) -> None:  # fmt: skip
    """Compare heads of noisy sums with heads of noisy prototypes, by epsilon and size of the fleet."""
    title = f"{BACKBONE}, {size} values, delta {DELTA:g}, {len(seeds)} seeds"
    table, runs = Table({**COLUMNS, **{f"{each:g}": ">8.1%" for each in epsilons}}, title=title), []
    how = map_of_photographs(size, at_most=at_most)
    for name in names:
        data = load_features(name, backbone=BACKBONE, image_size=SIZE, at_most=at_most)
        rows = how.rows(data.train)
        for images in (min(each, len(rows)) for each in sizes):
            without = [
                accuracy_of_sums(data, how, rows, images=images, devices=1, epsilon=None, seed=seed)
                for seed in seeds
            ]
            for fleet in devices:
                options: dict[str, Any] = {"images": images, "devices": fleet}
                by_epsilon = {
                    epsilon: [
                        accuracy_of_sums(data, how, rows, **options, epsilon=epsilon, seed=seed)
                        for seed in seeds
                    ]
                    for epsilon in epsilons
                }
                table.row(name, images, fleet, *map(np.mean, (without, *by_epsilon.values())))
                runs += [
                    {"data": name, **options, "epsilon": each, "sums": found}
                    for each, found in by_epsilon.items()
                ]
            runs.append({"data": name, "images": images, "devices": None, "epsilon": None, "sums": without})
            for epsilon in prototypes:
                rival = [
                    accuracy_of_prototypes(data, how, images=images, devices=TEN, epsilon=epsilon, seed=seed)
                    for seed in seeds
                ]
                runs.append(
                    {"data": name, "images": images, "devices": TEN, "epsilon": epsilon, "prototypes": rival}
                )
    tables = [table, *([_rivals(runs)] if prototypes else [])]
    write_json(json_file, "noisy-sums", tables=tables, plots=[_plot(runs, name) for name in names], runs=runs)


def _rivals(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of noisy prototypes beside sums with the same epsilon, which each of ten devices has."""
    table = Table(
        RIVAL_COLUMNS,
        title=f"noisy prototypes, the best of batches of {', '.join(map(str, BATCHES))}, {TEN} devices",
    )
    for rival in (run for run in runs if "prototypes" in run):
        same = {name: rival[name] for name in ("data", "images", "devices", "epsilon")}
        sums = [np.mean(run["sums"]) for run in runs if "sums" in run and same.items() <= run.items()]
        table.row(
            rival["data"], rival["images"], rival["epsilon"], *sums, float(np.mean(rival["prototypes"]))
        )
    return table


def _plot(runs: Sequence[Mapping[str, Any]], data: str) -> Plot:
    """Return the mean accuracy over epsilon of a data set, a line for each size and number of devices."""
    series: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        if run["data"] == data and "sums" in run and run["epsilon"] is not None:
            who = "noise once" if run["devices"] == 1 else f"noise of {run['devices']:g} devices"
            points = series.setdefault(f"{run['images']:,} images, {who}", [])
            points.append((run["epsilon"], float(np.mean(run["sums"]))))
    return Plot(title=f"Accuracy by epsilon, {data}", x="epsilon", y="accuracy", series=series, log=("x",))
