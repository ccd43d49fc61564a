"""`python -m research poisoned-rounds`: algorithms of rounds where some devices send false values."""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import click
import msgspec
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.registry import ALGORITHMS
from aggregator.config.schema import Robust
from aggregator.intake.validation import Prototypes, Refused
from benchmarks.data.images import DIGITS, NAMES
from benchmarks.options import repeated, selected
from benchmarks.report import Table, json_option, write_json
from protofleet.simulation.fleet import Client, Features
from protofleet.simulation.partitions import Partition, share_out
from research.poisoning.data_options import DataOptions, data_options
from research.rounds.heads import run_rounds

ATTACKS = ("none", "flip", "scale", "reverse", "claim", "directions", "spread", "still")
"""None; training with the label of the next class; all values times 100; changes times -10 and opposite prototypes;
the same with CLAIMED_IMAGES of each class. The last three are for `hierarchical`, with as many images: long directions
along what distinguishes classes; opposite prototypes with a great deviation, so that the fleet's count for more; and
the next class's prototypes without any deviation, so that the fleet's count for less."""

CLAIMED_IMAGES = 1_000_000

IN_ROUNDS = {name: kind for name, kind in ALGORITHMS.items() if issubclass(kind, RoundAlgorithm)}

METHODS: Mapping[str, Robust] = MappingProxyType({"none": Robust(clip_multiple=0.0), "clip": Robust()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One fleet."""

    algorithm: str
    attack: str
    method: str
    seed: int
    accuracy: float
    """Accuracy of the honest devices' heads over all classes alike, mean over devices; 0 if a submission is refused."""


@click.command("poisoned-rounds")
@data_options(names=list(dict.fromkeys((*NAMES, *DIGITS))), images=2000)
@repeated("--algorithm", "algorithms", type=click.Choice(list(IN_ROUNDS)), default=("fpl",))
@click.option("--rounds", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--clients", type=click.IntRange(min=1), default=6, show_default=True)
@click.option("--attackers", type=click.IntRange(min=0), default=1, show_default=True)
@selected("--attack", "attacks", choices=ATTACKS)
@selected("--method", "methods", choices=METHODS)
@repeated("--seed", "seeds", type=int, default=(0,))
@json_option
def command(
    *,
    source: DataOptions,
    algorithms: tuple[str, ...],
    rounds: int,
    clients: int,
    attackers: int,
    attacks: tuple[str, ...],
    methods: tuple[str, ...],
    seeds: tuple[int, ...],
    json_file: Path | None,
) -> None:
    """Measure accuracy in rounds in which some devices send false values. Clients share the images (Dirichlet 1)."""
    features = source.load()
    results: list[Result] = []
    for algorithm in algorithms:
        title = f"{algorithm}, {source.data}, {rounds} rounds, {attackers} of {clients} clients malicious"
        table = Table({"attack": "<9", **dict.fromkeys(methods, ">10")}, title=title)
        for attack in attacks:
            row = []
            for method in methods:
                runs = [
                    run(
                        features,
                        algorithm,
                        attack,
                        method,
                        rounds=rounds,
                        clients=clients,
                        attackers=attackers,
                        seed=seed,
                    )
                    for seed in seeds
                ]
                results += runs
                row.append(f"{100 * np.mean([one.accuracy for one in runs]):.1f} %")
            table.row(attack, *row)
    write_json(
        json_file, "poisoned-rounds", data=source.data, runs=[dataclasses.asdict(one) for one in results]
    )


def run(
    features: Features,
    algorithm: str,
    attack: str,
    method: str,
    *,
    rounds: int,
    clients: int,
    attackers: int,
    seed: int,
) -> Result:
    """Run the rounds of a fleet whose first devices send false values; evaluate the others."""
    owners = share_out(
        features.train_labels,
        Partition("dirichlet", 1.0),
        clients=clients,
        rng=np.random.default_rng(seed),
    )
    fleet = [
        _client(features, owners == number, is_mislabeled=attack == "flip" and number < attackers)
        for number in range(clients)
    ]

    def falsify(number: int, part: Prototypes) -> Prototypes:
        return falsified(part, attack) if number < attackers else part

    accuracy = 0.0
    with contextlib.suppress(Refused):  # a device's loss or values have left the accepted range
        outcome = run_rounds(
            msgspec.convert({"rounds": rounds}, IN_ROUNDS[algorithm]),
            fleet,
            classes=features.classes,
            seed=seed,
            robust=METHODS[method],
            falsify=falsify,
        )
        accuracy = float(outcome.balanced[attackers:].mean())
    return Result(
        algorithm=algorithm,
        attack=attack,
        method=method,
        seed=seed,
        accuracy=accuracy,
    )


def falsified(part: Prototypes, attack: str) -> Prototypes:
    """Return what an attacker sends in place of its own values."""
    if "directions" in part.tensors and attack in ("directions", "spread"):
        return _false_directions(part, attack)
    if "directions" in part.tensors and attack == "still":
        without = {name: np.zeros_like(values) for name, values in part.tensors.items()}
        counts = np.full_like(part.counts, CLAIMED_IMAGES)
        return Prototypes(np.roll(part.values, 1, axis=0), part.labels, counts, without)
    factors = {"scale": (100.0, 100.0), "reverse": (-1.0, -10.0), "claim": (-1.0, -10.0)}
    of_prototypes, of_changes = factors.get(attack, (1.0, 1.0))
    tensors = {name: np.float32(of_changes) * values for name, values in part.tensors.items()}
    counts = np.full_like(part.counts, CLAIMED_IMAGES) if attack == "claim" else part.counts
    return Prototypes(np.float32(of_prototypes) * part.values, part.labels, counts, tensors)


def _false_directions(part: Prototypes, attack: str) -> Prototypes:
    """Return false directions and deviations, each as long as float16 allows."""
    length = float(np.finfo(np.float16).max)
    shape, away = part.tensors["directions"].shape, part.values - part.values.mean(axis=0)
    along = np.resize(length * away / max(float(np.abs(away).max()), 1e-12), shape)
    directions, sign = (along, 1) if attack == "directions" else (np.zeros(shape), -1)
    tensors = {"directions": directions.astype(np.float32), "deviation": np.array([length], np.float32)}
    counts = np.full_like(part.counts, CLAIMED_IMAGES)
    return Prototypes(np.float32(sign) * part.values, part.labels, counts, tensors)


def _client(features: Features, mine: NDArray[np.bool_], *, is_mislabeled: bool) -> Client:
    labels = features.train_labels[mine]
    return Client(
        domain="",
        train=features.train[mine],
        train_labels=(labels + 1) % features.classes if is_mislabeled else labels,
        test=features.test,
        test_labels=features.test_labels,
        weights=np.full(len(features.test_labels), 1 / len(features.test_labels)),
    )
