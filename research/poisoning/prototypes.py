"""`python -m research poisoning`: heads of a fleet in which attackers upload false prototypes."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedtc.adapter import torch_device
from aggregator.algorithms.fedtc.recipe import recipe_of
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.config.schema import Robust
from aggregator.coordination.bounds import MAX_MULTIPLE
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.outlier_detection import judge
from aggregator.training.robust.outlier_statistics import summaries
from aggregator.training.robust.training_set import combine
from benchmarks.accuracy.fedtc import partitions_option
from benchmarks.data.images import NAMES
from benchmarks.fleets import Settings, accuracy_of, fleet_prototypes
from benchmarks.options import repeated, selected
from benchmarks.report import Table, json_option, write_json
from protocol.wire.principal_prototypes import PrincipalPrototypes
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition
from research.poisoning.data_options import DataOptions, data_options

ATTACKS = ("flip", "noise", "scale", "volume", "near")
BLOCK_ATTACKS = ("rows", "along", "diagonal", "zero", "counts")
"""Of blocks alone: longer rows; rows along the differences of the class means, with the sum of squares of the device's
images; a greater diagonal; no rows and no diagonal; and more images than the device has."""
PARTITIONS = ("dirichlet:0.5",)
SHARES = (0.0, 0.1, 0.2, 0.3)
NOISE_SCALE = 3.0
"""Deviations of a noisy device's prototypes, in those of all prototypes' values."""

SCALE = 3.0
"""Factor of the prototypes of a device that scales them."""

VOLUME = 50
"""Times that a device with the attack `volume` or `near` repeats its prototypes."""

TIMES: Mapping[str, tuple[float, float, int]] = MappingProxyType(
    {"rows": (30, 1, 1), "diagonal": (1, 1000, 1), "zero": (0, 0, 1), "counts": (1, 1, 1000)}
)
"""Factors of a block's rows, diagonal and counts."""

Form = Literal["batches", "auto"]
"""As `[client] prototypes` in the task file."""

Method = Literal["unlimited", "none", "check"]
METHODS: tuple[Method, ...] = ("unlimited", "none", "check")
"""`unlimited` limits nothing. `none` has no outlier detection, and the limits of weights and means; `check` has all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One fleet."""

    partition: str
    form: Form
    attack: str
    """Empty without attackers."""
    share: float
    """Share of the devices that attack."""
    seed: int
    attackers: int
    """Attackers that have uploaded."""
    found: int
    """Attackers that are quarantined."""
    honest: int
    """Other devices that have uploaded."""
    false_alarms: int
    """Other devices that are quarantined."""
    accuracies: Mapping[str, float]
    """The head's accuracy by method; empty without training."""


@click.command("poisoning")
@data_options(names=NAMES, images=10_000)
@partitions_option(*PARTITIONS)
@click.option("--clients", type=click.IntRange(min=1), default=20, show_default=True)
@repeated("--share", "shares", type=click.FloatRange(0, 1), default=SHARES)
@selected("--form", "forms", choices=get_args(Form))
@selected("--attack", "attacks", choices=(*ATTACKS, *BLOCK_ATTACKS))
@click.option(
    "--false-alarm-rate",
    type=click.FloatRange(0, 0.5, min_open=True),
    default=Robust().false_alarm_rate,
    show_default=True,
)
@click.option("--epochs", type=click.IntRange(min=1), help="Of the training.  [default: the recipe's]")
@click.option(
    "--adapter/--no-adapter",
    default=True,
    show_default=True,
    help="Or only linear discriminants, which is faster.",
)
@selected("--method", "methods", choices=METHODS)
@click.option("--train/--no-train", default=True, show_default=True, help="Or only detect attackers.")
@repeated("--seed", "seeds", type=int, default=(0, 1))
@click.option("--device", default="auto", show_default=True, help="Where to train: auto, cpu, cuda.")
@json_option
def command(
    *,
    source: DataOptions,
    partitions: list[Partition],
    clients: int,
    shares: tuple[float, ...],
    forms: tuple[Form, ...],
    attacks: tuple[str, ...],
    false_alarm_rate: float,
    epochs: int | None,
    adapter: bool,
    methods: tuple[Method, ...],
    train: bool,
    seeds: tuple[int, ...],
    device: str,
    json_file: Path | None,
) -> None:
    """Measure accuracy and quarantine in fleets in which a share of the devices sends false prototypes."""
    settings = Settings(
        clients=clients,
        alpha=0.99,
        batch_size=5,
        recipe=dataclasses.replace(recipe_of(Training(epochs=epochs)), adapter=adapter),
        device=torch_device(device),
    )
    features = source.load()
    methods = methods if train else ()
    columns = {
        "partition": "<15",
        "form": "<7",
        "attack": "<8",
        "share": ">6.0%",
        "found": ">9",
        "false alarms": ">14",
    }
    table = Table({**columns, **dict.fromkeys(methods, ">14")}, title=source.title(clients))
    results: list[Result] = []
    for partition in partitions:
        for share in shares:
            for form, attack in itertools.product(forms, attacks if share else ("",)):
                if form == "batches" and attack in BLOCK_ATTACKS:
                    continue
                runs = [
                    run(
                        *(features, partition, dataclasses.replace(settings, prototypes=form)),
                        attack=attack,
                        share=share,
                        false_alarm_rate=false_alarm_rate,
                        methods=methods,
                        seed=seed,
                    )
                    for seed in seeds
                ]
                table.row(*row(runs))
                results += runs
    every = [dataclasses.asdict(one) for one in results]
    write_json(json_file, "poisoning", data=source.data, false_alarm_rate=false_alarm_rate, runs=every)


def run(
    features: Features,
    partition: Partition,
    settings: Settings,
    *,
    attack: str,
    share: float,
    false_alarm_rate: float,
    methods: Sequence[Method],
    seed: int,
) -> Result:
    """Run a fleet whose last devices upload false prototypes; detect outliers, and train a head by each method."""
    parts = fleet_prototypes(features, partition, settings, seed=seed)
    first_attacker = round(settings.clients * (1 - share))
    attackers = {device for device in parts if int(device) >= first_attacker}
    centers = class_centers(features)
    uploaded = {
        device: falsified(part, attack, centers=centers, seed=seed) if device in attackers else part
        for device, part in parts.items()
    }
    classes = [str(label) for label in range(features.classes)]
    judgment = judge(summaries(uploaded), classes=classes, false_alarm_rate=false_alarm_rate)
    quarantined = judgment.quarantined.keys()
    included = [part for device, part in uploaded.items() if device not in quarantined]
    accuracies: dict[str, float] = {}
    for method in methods:
        if method == "check" and not quarantined and "none" in accuracies:
            accuracies[method] = accuracies["none"]
            continue
        data = combine(
            included if method == "check" else list(uploaded.values()),
            num_classes=features.classes,
            max_multiple=0 if method == "unlimited" else MAX_MULTIPLE,
        )
        trained = train_head(data, settings.recipe, seed=seed, device=settings.device)
        accuracies[method] = accuracy_of(trained.layers, features)
    return Result(
        partition=str(partition),
        form=settings.prototypes,
        attack=attack,
        share=share,
        seed=seed,
        attackers=len(attackers),
        found=len(attackers & quarantined),
        honest=len(parts.keys() - attackers),
        false_alarms=len(quarantined - attackers),
        accuracies=accuracies,
    )


def class_centers(features: Features) -> NDArray[np.float32]:
    """Return the mean of each class's training features (C, L)."""
    labels = range(features.classes)
    return np.stack([features.train[features.train_labels == label].mean(axis=0) for label in labels])


def falsified(part: Prototypes, attack: str, *, centers: NDArray[np.float32], seed: int) -> Prototypes:
    """Return the prototypes as the attack changes them.

    Args:
        part: those of an honest device.
        attack: with the label of the next class (`flip`), also repeated (`volume`); repeated and moved half of the way
            to the nearest other class (`near`); noise (`noise`), or multiples of them (`scale`); or one of
            BLOCK_ATTACKS, which changes a block alone.
        centers: the mean of each class (C, L).
        seed: of the noise.
    """
    block = None if part.block is None else _false_block(part.block, attack, centers=centers, seed=seed)
    if attack in BLOCK_ATTACKS:
        return dataclasses.replace(part, block=block)
    rows = np.tile(np.arange(len(part.labels)), VOLUME if attack in ("volume", "near") else 1)
    values, labels = _false_means(part.values[rows], part.labels[rows], attack, centers=centers, seed=seed)
    return Prototypes(values, labels, part.counts[rows], block=block)


def _false_means(
    values: NDArray[np.float32],
    labels: NDArray[np.int64],
    attack: str,
    *,
    centers: NDArray[np.float32],
    seed: int,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    if attack in ("flip", "volume"):
        return values, (labels + 1) % len(centers)
    if attack == "near":
        squares = ((centers[:, None] - centers) ** 2).sum(axis=2)
        np.fill_diagonal(squares, np.inf)
        away = (centers[squares.argmin(axis=1)] - centers)[labels]
        return values + np.float32(0.5) * away, labels
    if attack == "scale":
        return np.float32(SCALE) * values, labels
    if attack == "noise" and len(values):
        noise = np.random.default_rng(seed).normal(size=values.shape)
        return (NOISE_SCALE * float(values.std()) * noise).astype(np.float32), labels
    return values, labels


def _false_block(
    block: PrincipalPrototypes, attack: str, *, centers: NDArray[np.float32], seed: int
) -> PrincipalPrototypes:
    means, labels = _false_means(block.means, block.labels, attack, centers=centers, seed=seed)
    of_rows, of_diagonal, of_counts = TIMES.get(attack, (1, 1, 1))
    rows, diagonal = np.float32(of_rows) * block.rows, np.float32(of_diagonal) * block.diagonal
    squares = float((rows**2).sum() + diagonal.sum())
    if attack in ("volume", "near"):  # repeated
        rows, diagonal, of_counts = np.float32(np.sqrt(VOLUME)) * rows, VOLUME * diagonal, VOLUME
    elif attack == "scale":
        rows, diagonal = np.float32(SCALE) * rows, np.float32(SCALE**2) * diagonal
    elif attack == "noise":
        noise = np.random.default_rng([seed, 1]).normal(size=rows.shape)
        deviation = NOISE_SCALE * float(block.means.std()) * np.sqrt(block.images / max(len(rows), 1))
        rows = (deviation * noise).astype(np.float32)
    elif attack == "along" and len(rows):
        axes = np.linalg.svd(centers - centers.mean(axis=0), full_matrices=False)[2][: len(centers) - 1]
        axes = axes[: len(rows)]
        rows = (np.sqrt(squares / len(axes)) * axes).astype(np.float32)
        diagonal = np.zeros_like(diagonal)
    return PrincipalPrototypes(means, labels, of_counts * block.counts, rows, diagonal)


def row(runs: Sequence[Result]) -> tuple[Any, ...]:
    """Return a row of the table: devices found over all seeds, and accuracies with their deviations over seeds."""
    first = runs[0]
    found = f"{sum(one.found for one in runs)}/{sum(one.attackers for one in runs)}"
    false_alarms = f"{sum(one.false_alarms for one in runs)}/{sum(one.honest for one in runs)}"
    values = ([100 * one.accuracies[method] for one in runs] for method in first.accuracies)
    cells = (f"{np.mean(each):.1f} ± {np.std(each):.1f}" for each in values)
    return (first.partition, first.form, first.attack or "-", first.share, found, false_alarms, *cells)
