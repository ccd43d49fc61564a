"""`python -m research poisoned-statistics`: heads from sums where some devices send false ones."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.statistics.feature_map import LEVELS
from aggregator.config.schema import Robust
from benchmarks.accuracy.fedtc import partitions_option
from benchmarks.data.images import NAMES
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from protocol.statistics.integer_rows import MAX_VALUE
from protofleet.simulation.partitions import Partition, share_out
from protofleet.simulation.statistics import MappedFeatures, map_features, run_fleet
from research.poisoning.data_options import DataOptions, data_options

ATTACKS = ("", "flip", "volume", "scatter", "claims", "swap", "mirror", "nearest", "near")
"""None; all images with the label of the next class; the same, VOLUME times; rows along the differences of the class
means, as long as rows may be, VOLUME times; CLAIMS images for each one of a device's in class 0, all at the mean of
class 1; the mean of the next class in place of each image, VOLUME times; instead of each image a row as long as rows
may be, opposite to the class's mean, or in the direction of the nearest other one, VOLUME times; the device's images
moved by NEAR of the way to opposite of their class's mean, MULTIPLE times."""

VOLUME = 100
CLAIMS = 1000
NEAR = 0.7
MULTIPLE = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One fleet."""

    partition: str
    batch_size: int
    attack: str
    seed: int
    unlimited: float
    """Accuracy if all images counted and outliers were not looked for."""
    accuracy: float
    found: int
    """Attackers that are quarantined."""


@click.command("poisoned-statistics")
@data_options(names=NAMES, images=2000)
@partitions_option("dirichlet:0.5")
@click.option("--features", "random_features", type=click.IntRange(min=0), default=0, show_default=True)
@repeated("--batch", "batches", type=click.IntRange(min=1), default=(1, 5))
@click.option("--clients", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--attackers", type=click.IntRange(min=0), default=1, show_default=True)
@repeated("--seed", "seeds", type=int, default=(0, 1))
@json_option
def command(
    *,
    source: DataOptions,
    partitions: list[Partition],
    random_features: int,
    batches: tuple[int, ...],
    clients: int,
    attackers: int,
    seeds: tuple[int, ...],
    json_file: Path | None,
) -> None:
    """Measure the accuracy of a head from sums of which some devices send false ones."""
    data = map_features(source.load(), random_features=random_features, seed=0)
    columns = {"partition": "<15", "batch": ">6", "attack": "<7", "found": ">6"}
    table = Table({**columns, "unlimited": ">10.1%", "accuracy": ">9.1%"}, title=source.title(clients))
    results: list[Result] = []
    for partition in partitions:
        for batch_size in batches:
            for attack in ATTACKS if attackers else ATTACKS[:1]:
                runs = [
                    run(
                        *(data, partition, attack),
                        batch_size=batch_size,
                        clients=clients,
                        attackers=range(clients - attackers, clients),
                        seed=seed,
                    )
                    for seed in seeds
                ]
                unlimited, accuracy = (
                    float(np.mean([getattr(one, name) for one in runs])) for name in ("unlimited", "accuracy")
                )
                found = sum(one.found for one in runs)
                table.row(str(partition), batch_size, attack or "-", found, unlimited, accuracy)
                results += runs
    every = [dataclasses.asdict(one) for one in results]
    write_json(json_file, "poisoned-statistics", data=source.data, runs=every)


def run(
    data: MappedFeatures,
    partition: Partition,
    attack: str,
    *,
    batch_size: int,
    clients: int,
    attackers: Sequence[int],
    seed: int,
) -> Result:
    """Run a fleet twice, without and with the default protection."""
    labels = data.features.train_labels
    owners = share_out(labels, partition, clients=clients, rng=np.random.default_rng(seed))
    if attack:
        data, owners = _poisoned(data, owners, attackers, attack, seed=seed)
    unlimited, protected = (
        run_fleet(data, owners, batch_size=batch_size, seed=seed, robust=robust)
        for robust in (Robust(detect_outliers=False, max_multiple=0), Robust())
    )
    return Result(
        partition=str(partition),
        batch_size=batch_size,
        attack=attack,
        seed=seed,
        unlimited=unlimited.accuracy,
        accuracy=protected.accuracy,
        found=len({str(attacker) for attacker in attackers} & set(protected.quarantined)) if attack else 0,
    )


def _poisoned(
    data: MappedFeatures, owners: NDArray[np.int64], attackers: Sequence[int], attack: str, *, seed: int
) -> tuple[MappedFeatures, NDArray[np.int64]]:
    """Return data and owners in which the attackers have false rows in place of theirs."""
    labels = data.features.train_labels
    means = np.stack([data.rows[labels == label].mean(axis=0) for label in range(data.features.classes)])
    rng = np.random.default_rng(seed)
    honest = ~np.isin(owners, attackers)
    parts = [(data.rows[honest], labels[honest], owners[honest])]
    for attacker in attackers:
        mine = owners == attacker
        longest = [length for _, length in data.feature_map.longest]
        rows, false = _false_rows(
            data.rows[mine], labels[mine], attack, means=means, longest=min(longest), rng=rng
        )
        parts.append((rows, false, np.full(len(false), attacker)))
    rows, labels, owners = (np.concatenate(column) for column in zip(*parts, strict=True))
    features = dataclasses.replace(
        data.features,
        train=np.zeros((len(rows), data.features.train.shape[1]), np.float32),
        train_labels=labels,
    )
    return dataclasses.replace(data, features=features, rows=rows), owners


def _false_rows(
    rows: NDArray[np.int8],
    labels: NDArray[np.int64],
    attack: str,
    *,
    means: NDArray[np.float64],
    longest: float,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Return an attacker's rows and labels, of its rows (n, D) and labels (n,) and the fleet's class means (C, D)."""
    classes, size = means.shape
    following = (labels + 1) % classes
    if attack == "flip":
        return rows, following
    if attack == "volume":
        return np.tile(rows, (VOLUME, 1)), np.tile(following, VOLUME)
    if attack == "scatter":
        axes = np.linalg.svd(means - means.mean(axis=0), full_matrices=False)[2][: classes - 1]
        along = rng.normal(size=(len(rows), classes - 1))
        along *= LEVELS * np.sqrt(size) / np.linalg.norm(along, axis=1, keepdims=True)
        long = np.clip(np.rint(along @ axes), -MAX_VALUE, MAX_VALUE).astype(np.int8)
        return np.tile(np.concatenate([long, -long]), (VOLUME // 2, 1)), np.tile(labels, VOLUME)
    if attack in ("mirror", "nearest", "near"):
        times = MULTIPLE if attack == "near" else VOLUME
        moved = _at_most(_moved(rows, labels, attack, means=means), longest)
        return np.tile(moved, (times, 1)), np.tile(labels, times)
    wrong = np.rint(means).astype(np.int8)
    if attack == "swap":
        return np.tile(wrong[following], (VOLUME, 1)), np.tile(labels, VOLUME)
    others, claimed = labels != 0, CLAIMS * len(labels) // classes
    return (
        np.concatenate([rows[others], np.tile(wrong[1], (claimed, 1))]),
        np.concatenate([labels[others], np.zeros(claimed, np.int64)]),
    )


def _moved(
    rows: NDArray[np.int8], labels: NDArray[np.int64], attack: str, *, means: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return false rows (n, D), of any length, in place of the rows (n, D) of classes (n,)."""
    classes, size = means.shape
    if attack == "near":
        near: NDArray[np.float64] = rows + NEAR * 2 * (means.mean(axis=0) - means)[labels]
        return near
    apart = np.square(means[:, None] - means).sum(axis=2) + np.diag(np.full(classes, np.inf))
    others = means.mean(axis=0) if attack == "mirror" else means[apart.argmin(axis=1)]
    far: NDArray[np.float64] = LEVELS * size * (others - means)[labels]
    return far


def _at_most(rows: NDArray[np.float64], longest: float) -> NDArray[np.int8]:
    """Return rows (n, D), rounded, of which those that are longer than rows of images may be are shortened."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    shortened = rows * np.minimum(1.0, 0.97 * longest / np.maximum(lengths, 1.0))
    integers: NDArray[np.int8] = np.clip(np.rint(shortened), -MAX_VALUE, MAX_VALUE).astype(np.int8)
    return integers
