"""`python -m research cells`: batches of images that are alike, and what they give away (ADR 0034)."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.adapter import train_adapter
from aggregator.algorithms.fedtc.discriminant import discriminants
from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.coordination.bounds import MAX_MULTIPLE
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.training_set import combine, pool
from benchmarks.data.features import VALIDATION, load_features, prepared
from benchmarks.data.images import NAMES, load_data
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from edge_client.prototypes.outlier_filter import closest_features
from edge_client.prototypes.prototype_averaging import average
from protocol.wire.codec import encode
from protocol.wire.quantization import prototype_fields
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition, share_out
from protofleet.submissions import submission_of
from research.privacy.leakage import Release, rounded, study
from research.privacy.reconstruction import Form, Scene, attack, learn_decoder, set_scene

ITERATIONS = 8
CLIENTS = 10
PUBLIC = 10_000
PER_CLASS = 200
CELLS_OF_A_DEVICE = 10_000
"""More than the cells of one class on a device."""

COLUMNS = {"B": "<4", "cell": ">6", "seed": ">6", "MB up": ">8.1f", "adapter": ">9.2%", "LDA": ">9.2%"}
LEAKS = {
    "B": "<4", "cell": ">6", "form": ">10", "own": ">7.3f", "others": ">8.3f", "own first": ">11.1%",
    "AUC cos": ">9.3f", "AUC lik": ">9.3f", "1/100 cos": ">11.1%", "1/100 lik": ">11.1%",
}  # fmt: skip


@click.command("cells")
@click.option("--data", type=click.Choice(NAMES), default="fashion_mnist", show_default=True)
@repeated("--part", "parts", type=click.Choice(("attack", "accuracy")), default=("attack", "accuracy"))
@click.option(
    "--batch", type=click.IntRange(min=1), default=5, show_default=True, help="Images in a prototype."
)
@repeated(
    "--cell", "cells", type=click.IntRange(min=0), default=(0, 50), help="Images in a cell; 0 for no cells."
)
@click.option("--root", is_flag=True, help="Take the square root of features, for accuracy.")
@repeated("--seed", "seeds", type=int, default=(0,), help="Of the accuracy.")
@json_option
def command(
    *,
    data: str,
    parts: tuple[str, ...],
    batch: int,
    cells: tuple[int, ...],
    root: bool,
    seeds: tuple[int, ...],
    json_file: Path | None,
) -> None:
    """Average random images of a class, or of a cell of it: accuracy on validation images, and attacks."""
    features = load_features(data, backbone="mobilenetv2_100", image_size=96)
    runs: list[dict[str, float]] = []
    if "attack" in parts:
        scene = set_scene(load_data(data), features, public=PUBLIC, per_class=PER_CLASS, seed=0)
        decoder = learn_decoder(scene, epochs=4, seed=0, device="cpu")
        table = Table(
            LEAKS, title=f"{data}: {PUBLIC:,} public images, a device with {PER_CLASS} of each class"
        )
        for cell in cells:
            release = _release(scene, batch=batch, cell=cell)
            classes = int(release.labels.max()) + 1
            restored = TrainingSet(
                release.values, release.labels, release.counts, classes, restore=True
            ).features
            for name, guess in (("prototype", release.values), ("restored", restored)):
                form = Form(name, release, guess, scene.features, study(*scene.public))
                leak = attack(scene, form, decoder, seed=0)
                table.row(
                    *(f"{batch}", cell, name, leak.own, leak.others, leak.own_first, leak.cosine.auc),
                    *(leak.likelihood.auc, leak.cosine.top_1, leak.likelihood.top_1),
                )
                runs.append(
                    {"cell": cell, "own": leak.own, "others": leak.others, "own_first": leak.own_first}
                )
    if "accuracy" in parts:
        split = prepared(features, root=root, validation=True)
        table = Table(
            COLUMNS, title=f"{data}: {CLIENTS} devices, Dirichlet 0.1, {VALIDATION:,} validation images"
        )
        for seed in seeds:
            rng = np.random.default_rng(seed)
            owners = share_out(split.train_labels, Partition("dirichlet", 0.1), clients=CLIENTS, rng=rng)
            for cell in cells:
                made = accuracies(split, owners, batch=batch, cell=cell, seed=seed)
                table.row(f"{batch}", cell, seed, made.bytes_up / 1e6, made.adapter, made.discriminant)
                runs.append({"cell": cell, "seed": seed, "adapter": made.adapter, "lda": made.discriminant})
    write_json(json_file, "cells", data=data, batch=batch, root=root, runs=runs)


def batches_of_cells(
    features: NDArray[np.float32], *, batch: int, cell: int, alpha: float, rng: np.random.Generator
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the prototype of each image (n,), -1 for none, and the cell of each prototype (m,).

    Each prototype has at least `batch` images, all of one cell, dealt at random; a cell of fewer joins the nearest one.
    """
    numbers = np.full(len(features), -1)
    kept = np.flatnonzero(closest_features(lambda: [features], alpha=alpha))
    if len(kept) < min(2, batch):
        return numbers, numbers[:0]
    labels = _k_means(features[kept], max(1, round(len(kept) / cell)) if cell else 1, rng)
    while True:
        sizes = np.bincount(labels)
        present = np.flatnonzero(sizes).tolist()
        small = [each for each in present if sizes[each] < batch]
        if not small or len(present) == 1:
            break
        centers = {each: features[kept][labels == each].mean(axis=0) for each in present}
        smallest = min(small, key=lambda each: int(sizes[each]))
        distance = {
            each: float(((centers[smallest] - centers[each]) ** 2).sum())
            for each in present
            if each != smallest
        }
        labels[labels == smallest] = min(distance, key=distance.__getitem__)
    cells: list[int] = []
    for each in np.unique(labels).tolist():
        rows = rng.permutation(kept[labels == each])
        count = max(len(rows) // batch, 1)
        numbers[rows] = len(cells) + np.minimum(np.arange(len(rows)) // batch, count - 1)
        cells += [each] * count
    return numbers, np.array(cells)


def _k_means(features: NDArray[np.float32], number: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return the cell of each image (n,), by a few of Lloyd's iterations from random images."""
    if number <= 1:
        return np.zeros(len(features), dtype=np.intp)
    squares = (features**2).sum(axis=1)
    centers: NDArray[np.floating[Any]] = features[rng.choice(len(features), number, replace=False)]
    for _ in range(ITERATIONS):
        distances = (centers**2).sum(axis=1) - 2 * features @ centers.T
        nearest = distances.argmin(axis=1)
        sizes = np.bincount(nearest, minlength=number)
        sums = np.zeros(centers.shape, centers.dtype)
        np.add.at(sums, nearest, features)
        farthest = np.argsort(-(distances[np.arange(len(features)), nearest] + squares))
        for at, empty in enumerate(np.flatnonzero(sizes == 0)):
            sums[empty], sizes[empty] = features[farthest[at]], 1
        centers = sums / sizes[:, None]
    found: NDArray[np.intp] = ((centers**2).sum(axis=1) - 2 * features @ centers.T).argmin(axis=1)
    return found


@dataclass(frozen=True, kw_only=True)
class Accuracies:
    """The bytes of all devices' prototypes, and the accuracies of the heads made from them."""

    bytes_up: int
    adapter: float
    discriminant: float


def accuracies(
    data: Features,
    owners: NDArray[np.int64],
    *,
    batch: int,
    cell: int,
    seed: int,
    max_multiple: float = MAX_MULTIPLE,
) -> Accuracies:
    """Average random images of cells on each device, and make both heads; `owners` are the devices, (n,)."""
    made, of_parts = _parts(data, owners, batch=batch, cell=cell, seed=seed)
    joined = combine(
        [replace(part, values=rounded(part.values)) for part in made],
        num_classes=data.classes,
        max_multiple=max_multiple,
    )
    prototypes = replace(joined, restore=True, devices=of_parts if cell else joined.devices).evenly_weighted()
    # Mixed over the whole class, deviations would lose the shape of the cells.
    recipe = replace(RECIPES["default"], mix=not cell)
    layers, _ = train_adapter(prototypes, recipe=recipe, seed=seed, device="cpu")
    (linear,) = discriminants(prototypes.centers, prototypes.deviations, prototypes.samples, (1.0,))
    adapter, simple = (
        float((logits_of(head, data.test).argmax(axis=1) == data.test_labels).mean())
        for head in (layers, [linear])
    )
    return Accuracies(bytes_up=sum(map(_bytes_of, made)), adapter=adapter, discriminant=simple)


def _bytes_of(part: Prototypes) -> int:
    """Return the size of a device's encoded submission."""
    fields = prototype_fields(part.values.astype(np.float16))
    return len(
        encode(
            submission_of(part.labels, part.counts, task=bytes(32), images=int(part.counts.sum()), **fields)
        )
    )


def _parts(
    data: Features, owners: NDArray[np.int64], *, batch: int, cell: int, seed: int
) -> tuple[list[Prototypes], NDArray[np.intp]]:
    """Return each device's prototypes, and the cell of each, of all devices."""
    parts, cells = [], []
    for client in np.unique(owners).tolist():
        rng = np.random.default_rng([seed, client])
        made: list[Prototypes] = []
        for label in range(data.classes):
            features = data.train[(owners == client) & (data.train_labels == label)]
            numbers, of_class = batches_of_cells(features, batch=batch, cell=cell, alpha=0.99, rng=rng)
            if len(of_class):
                values, counts = _averages(features, numbers)
                made.append(Prototypes(values, np.full(len(counts), label), counts))
                cells.append(of_class + CELLS_OF_A_DEVICE * client)
        parts.append(pool(made))
    return parts, np.concatenate(cells)


def _averages(
    features: NDArray[np.float32], numbers: NDArray[np.intp]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    used = numbers >= 0
    values, counts = average(lambda: [features[used]], numbers[used])
    return values, counts.astype(np.int64)


def _release(scene: Scene, *, batch: int, cell: int) -> Release:
    """Return the attacked device's prototypes, without outlier filtering, and the images in each."""
    values, labels, members = [], [], []
    for label in np.unique(scene.labels[scene.device]):
        own = scene.device[scene.labels[scene.device] == label]
        rng = np.random.default_rng([0, int(label)])
        numbers, cells = batches_of_cells(scene.features[own], batch=batch, cell=cell, alpha=1.0, rng=rng)
        values.append(_averages(scene.features[own], numbers)[0])
        labels += [int(label)] * len(cells)
        members += [own[numbers == number] for number in range(len(cells))]
    return Release.without_noise(np.concatenate(values), np.array(labels), members)
