"""`python -m research block-size`: the largest and the smallest block, bits, and what deleted images cost."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.arrays import Arrays
from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.scatter import scatter_set
from benchmarks.data.features import load_features, prepared
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from edge_client.prototypes.outlier_filter import closest_features
from edge_client.prototypes.principal_prototypes import coefficients, most_rows, principal_prototypes
from protocol.wire.principal_prototypes import MIN_GROUP_IMAGES, PrincipalPrototypes, joined
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition, share_out

BACKBONE, IMAGE_SIZE, DEVICES, ALPHA = "mobilenetv2_100:c384,c576", 96, 10, 0.99

COLUMNS = {
    "data": "<14", "images": ">7", "largest": ">8", "least": ">6", "bits": ">5", "accuracy": ">9.1%", "MB": ">6.2f",
    "1 % deleted": ">12.1%",
}  # fmt: skip

NO_LIMIT = 10**9


@click.command("block-size")
@repeated("--data", "names", type=click.Choice(["fashion_mnist", "cifar10"]), default=("fashion_mnist", "cifar10"),
          help="May be repeated.")  # fmt: skip
@repeated("--images", "sizes", type=int, default=(6_000,), help="Of the fleet; may be repeated.")
@repeated("--largest", type=int, default=(0, 1_000, 400, 200), help="Images of a block; 0 for no limit.")
@repeated("--least", type=int, default=(50,), help="Images of a block; may be repeated.")
@repeated("--bits", type=click.Choice(["8", "4"]), default=("8",), help="Of a value; may be repeated.")
@repeated("--seed", "seeds", type=int, default=(0, 1, 2), help="May be repeated.")
@click.option(
    "--at-most", type=int, default=20_000, show_default=True, help="Features of a data set to load."
)
@json_option
def command(
    *, names: tuple[str, ...], sizes: tuple[int, ...], largest: tuple[int, ...], least: tuple[int, ...],
    bits: tuple[str, ...], seeds: tuple[int, ...], at_most: int, json_file: Path | None,
) -> None:  # fmt: skip
    """Compare blocks on training images that are held out, with ten devices, Dirichlet 0.1, and the closed form head.

    A device's last column is after 1 % of its images were deleted: blocks that lost one are batches then.
    """
    table, runs = Table(COLUMNS, title="Blocks"), []
    for name in names:
        loaded = load_features(
            name, backbone=BACKBONE, image_size=IMAGE_SIZE, at_most=None if at_most >= 60_000 else at_most
        )
        features = prepared(loaded, root=False, validation=True)
        for images in sizes:
            for most in largest:
                for fewest in least:
                    found = [
                        list(run(features, images, most or NO_LIMIT, fewest, bits, seed)) for seed in seeds
                    ]
                    for at, each in enumerate(bits):
                        rows = np.mean([run_found[at] for run_found in found], axis=0)
                        table.row(name, images, most or "none", fewest, each, *rows)
                        runs.append({"data": name, "images": images, "largest": most, "least": fewest,
                                     "bits": each, "figures": rows.tolist()})  # fmt: skip
    write_json(json_file, "block-size", tables=[table], seeds=seeds, runs=runs)


def run(
    features: Features, images: int, most: int, least: int, bits: Sequence[str], seed: int
) -> Iterator[tuple[float, float, float]]:
    """Yield accuracy, MB of all devices, and the accuracy after deletions, for each number of bits."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(features.train))[:images]
    train, labels = features.train[chosen], features.train_labels[chosen]
    owners = share_out(labels, Partition("dirichlet", 0.1), clients=DEVICES, rng=rng)
    made = []
    for device in np.unique(owners):
        mine = owners == device
        made.append(
            uploads(train[mine], labels[mine], widths=features.widths, most=most, least=least, rng=rng)
        )
    for each in bits:
        steps = 2 ** int(each) - 1
        sent = [in_steps(upload, steps) for upload, _ in made]
        later = [in_steps(upload, steps) for _, upload in made]
        size_mb = sum(values_of(upload) for upload, _ in made) * int(each) / 8e6
        yield accuracy(features, sent), size_mb, accuracy(features, later)


def uploads(
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
    *,
    widths: Sequence[int],
    most: int,
    least: int,
    rng: np.random.Generator,
) -> tuple[Prototypes, Prototypes]:
    """Return what a device uploads, and what after 1 % of its images were deleted."""
    members, groups = _dealt(features, labels, rng)
    deleted = rng.random(len(labels)) < 0.01
    sent, later = [], []
    parts = -(-len(members) // most) if len(members) >= least else 0
    sizes = np.bincount(groups)
    part_of = ((np.cumsum(sizes) - sizes) * max(parts, 1) // max(len(members), 1))[groups]
    in_batches, in_batches_later = (np.full(len(members), not parts) for _ in range(2))
    for part in range(parts):
        mine = members[part_of == part]
        numbers = np.unique(labels[mine], return_inverse=True)[1]
        group = np.unique(groups[part_of == part], return_inverse=True)[1]
        found = coefficients(features[mine], numbers, group, batch_size=MIN_GROUP_IMAGES, widths=widths)
        if found is None:
            in_batches |= part_of == part
            in_batches_later |= part_of == part
            continue
        rows = found[: most_rows(len(mine), features.shape[1])]
        block = principal_prototypes(features[mine], labels[mine], rows)
        sent.append(block)
        if deleted[mine].any():
            in_batches_later |= part_of == part
        else:
            later.append(block)
    in_batches_later &= ~np.isin(groups, groups[deleted[members]])
    return (
        Prototypes(*_means(features, labels, members, groups, in_batches), block=_joined(sent)),
        Prototypes(*_means(features, labels, members, groups, in_batches_later), block=_joined(later)),
    )


def _joined(blocks: list[PrincipalPrototypes]) -> PrincipalPrototypes | None:
    return joined(blocks) if blocks else None


def _dealt(
    features: NDArray[np.float32], labels: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the images in groups, class after class, and the number of each one's group."""
    members, groups, made = [np.zeros(0, np.intp)], [np.zeros(0, np.intp)], 0
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        kept = rng.permutation(mine[closest_features(partial(_chunks, features[mine]), alpha=ALPHA)])
        count = len(kept) // MIN_GROUP_IMAGES
        if not count:
            continue
        members.append(kept)
        groups.append(np.minimum(np.arange(len(kept)) // MIN_GROUP_IMAGES, count - 1) + made)
        made += count
    return np.concatenate(members), np.concatenate(groups)


def _chunks(features: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    return [features]


def _means(
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
    members: NDArray[np.intp],
    groups: NDArray[np.intp],
    chosen: NDArray[np.bool_],
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """Return the mean, the class and the images of each group of the chosen images."""
    if not chosen.any():
        return np.zeros((0, features.shape[1]), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64)
    numbers, first, at, counts = np.unique(
        groups[chosen], return_index=True, return_inverse=True, return_counts=True
    )
    sums = np.zeros((len(numbers), features.shape[1]))
    np.add.at(sums, at, features[members[chosen]])
    return (sums / counts[:, None]).astype(np.float32), labels[members[chosen]][first], counts


def values_of(upload: Prototypes) -> int:
    """Return the values of an upload, one for each step of rows and values' ranges."""
    block = upload.block
    of_block = 0 if block is None else len(block.means) + len(block.rows) + 1
    return int((len(upload.values) + of_block + 4) * upload.values.shape[1])


def in_steps(upload: Prototypes, steps: int) -> Prototypes:
    """Return an upload with values in steps: means between the least and the greatest, rows by their greatest."""
    block = upload.block
    every = upload.values if block is None else np.concatenate([upload.values, block.means])
    low, high = every.min(axis=0), every.max(axis=0)
    step = np.where(high > low, (high - low) / steps, 1)

    def means(values: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.asarray(np.rint((values - low) / step) * step + low, np.float32)

    def scaled(values: NDArray[np.float32], most: int) -> NDArray[np.float32]:
        scale = np.abs(values).max(axis=1, keepdims=True, initial=1e-9) / most
        return np.asarray(np.rint(values / scale) * scale, np.float32)

    if block is not None:
        diagonal = scaled(np.sqrt(block.diagonal)[None], steps)[0] ** 2
        block = replace(
            block, means=means(block.means), rows=scaled(block.rows, steps // 2), diagonal=diagonal
        )
    return replace(upload, values=means(upload.values), block=block)


def accuracy(features: Features, sent: Sequence[Prototypes]) -> float:
    """Return the accuracy of the head in closed form of all uploads, also of batches alone."""
    data = scatter_set(
        sent, num_classes=features.classes, factors=np.ones(len(sent)), max_multiple=0, arrays=Arrays()
    )
    layers = train_head(data, RECIPES["default"], seed=0, device="cpu").layers
    return float((logits_of(layers, features.test).argmax(axis=1) == features.test_labels).mean())
