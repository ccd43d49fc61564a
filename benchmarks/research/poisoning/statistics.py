"""`python -m benchmarks research poisoned-statistics`: heads from sums where some devices send false ones."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.config.schema import Robust
from benchmarks.accuracy.fedtc import partitions_option
from benchmarks.data.images import NAMES
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from benchmarks.research.poisoning.data_options import DataOptions, data_options
from protofleet.simulation.partitions import Partition, share_out
from protofleet.simulation.statistics import MappedFeatures, map_features, run_fleet

ATTACKS = ("", "flip", "volume")
"""None; all images with the label of the next class; the same, VOLUME times."""

VOLUME = 20


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
    """Measure the accuracy of a head from sums of which some devices have the wrong labels."""
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
        data, owners = _poisoned(
            data, owners, np.isin(owners, attackers), times=VOLUME if attack == "volume" else 1
        )
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
    data: MappedFeatures, owners: NDArray[np.int64], false: NDArray[np.bool_], *, times: int
) -> tuple[MappedFeatures, NDArray[np.int64]]:
    """Return data and owners in which false images have the next class's label, and occur so many times."""
    features = data.features
    rows = np.concatenate([np.flatnonzero(~false), np.tile(np.flatnonzero(false), times)])
    labels = np.where(false, (features.train_labels + 1) % features.classes, features.train_labels)
    poisoned = dataclasses.replace(features, train=features.train[rows], train_labels=labels[rows])
    return dataclasses.replace(data, features=poisoned, rows=data.rows[rows]), owners[rows]
