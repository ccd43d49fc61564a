"""`python -m research block-size`: the largest and the smallest block, bits, and what deleted images cost."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.data.features import load_features, prepared
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from edge_client.data.outlier_filter import closest_features
from edge_client.data.principal_prototypes import coefficients, most_rows, principal_prototypes
from protocol.wire.principal_prototypes import MIN_GROUP_IMAGES, PrincipalPrototypes
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition, share_out

BACKBONE, IMAGE_SIZE, DEVICES, ALPHA = "mobilenetv2_100:c384,c576", 96, 10, 0.99

COLUMNS = {
    "data": "<14", "images": ">7", "largest": ">8", "least": ">6", "bits": ">5", "accuracy": ">9.1%", "MB": ">6.2f",
    "1 % deleted": ">12.1%",
}  # fmt: skip

NO_LIMIT = 10**9


class Upload(NamedTuple):
    """A device's upload: blocks, and means of batches with their classes and counts."""

    blocks: list[PrincipalPrototypes]
    means: NDArray[np.float32]
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]


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
) -> tuple[Upload, Upload]:
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
        Upload(sent, *_means(features, labels, members, groups, in_batches)),
        Upload(later, *_means(features, labels, members, groups, in_batches_later)),
    )


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


def values_of(upload: Upload) -> int:
    """Return the values of an upload, one for each step of rows and values' ranges."""
    size = upload.means.shape[1]
    rows = len(upload.means) + sum(len(each.means) + len(each.rows) for each in upload.blocks)
    return int((rows + 4 + bool(upload.blocks)) * size)


def in_steps(upload: Upload, steps: int) -> Upload:
    """Return an upload with values in steps: means between the least and the greatest, rows by their greatest."""
    rows = [upload.means, *(each.means for each in upload.blocks)]
    low, high = np.concatenate(rows).min(axis=0), np.concatenate(rows).max(axis=0)
    step = np.where(high > low, (high - low) / steps, 1)

    def means(values: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.asarray(np.rint((values - low) / step) * step + low, np.float32)

    def scaled(values: NDArray[np.float32], most: int) -> NDArray[np.float32]:
        scale = np.abs(values).max(axis=1, keepdims=True, initial=1e-9) / most
        return np.asarray(np.rint(values / scale) * scale, np.float32)

    blocks = [
        replace(
            each,
            means=means(each.means),
            rows=scaled(each.rows, steps // 2),
            diagonal=scaled(np.sqrt(each.diagonal)[None], steps)[0] ** 2,
        )
        for each in upload.blocks
    ]
    return upload._replace(means=means(upload.means), blocks=blocks)


def accuracy(features: Features, sent: Sequence[Upload]) -> float:
    """Return the accuracy of the linear discriminant of all uploads, with a ridge of D / N of the scatter's trace."""
    size = features.train.shape[1]
    scatter, total = np.zeros((size, size)), 0
    means, labels, counts = [], [], []
    for upload in sent:
        for block in upload.blocks:
            scatter += block.rows.T.astype(float) @ block.rows
            scatter[np.diag_indices(size)] += block.diagonal
            total += block.images
            means.append(block.means)
            labels.append(block.labels)
            counts.append(block.counts)
        for label in np.unique(upload.labels):
            mine = upload.labels == label
            weights = upload.counts[mine].astype(float)
            mean = weights @ upload.means[mine] / weights.sum()
            if mine.sum() > 1:
                deviations = (upload.means[mine] - mean) * np.sqrt(weights)[:, None]
                scatter += deviations.T @ deviations * weights.sum() / (mine.sum() - 1)
            total += int(weights.sum())
            means.append(mean[None])
            labels.append(np.array([label]))
            counts.append(weights.sum(keepdims=True))
    every, of, weight = np.concatenate(means), np.concatenate(labels), np.concatenate(counts)
    images = np.bincount(of, weight, minlength=features.classes)
    centers = np.zeros((features.classes, size))
    np.add.at(centers, of, every * weight[:, None])
    centers /= np.maximum(images, 1)[:, None]
    deviations = (every - centers[of]) * np.sqrt(weight)[:, None]
    scatter += deviations.T @ deviations
    known = np.flatnonzero(images)
    middle = centers[known].mean(axis=0)
    directions = np.linalg.solve(
        scatter + np.trace(scatter) / total * np.eye(size), (centers[known] - middle).T
    )
    thresholds = 0.5 * ((centers[known] - middle) * directions.T).sum(axis=1)
    predicted = known[((features.test - middle) @ directions - thresholds).argmax(axis=1)]
    return float((predicted == features.test_labels).mean())
