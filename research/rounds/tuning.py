"""`python -m research tune`: settings of FedPCL and its rivals, chosen on validation images one after the other."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import click
import msgspec
import numpy as np

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.hierarchical import Hierarchical
from benchmarks.data.domains import LABEL_DOMAIN, SHIFTS, load_domains, shifted
from benchmarks.data.images import DIGITS
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from protofleet.simulation.fleet import Client
from research.rounds.baselines import Method, Recipe, run_baseline
from research.rounds.eager import eager_accuracies
from research.rounds.fedpcl import IMAGE_SIZE, backbones_of, layers_option, recipes_of

IMAGES, PER_CLASS, CONCENTRATION = 2000, 10, 1.0
"""As by default in `python -m research fedpcl`."""

CLIENTS = 4
"""With label shift alone, fewer than there."""

Settings: TypeAlias = Recipe | RoundAlgorithm
Candidates: TypeAlias = Mapping[str, Sequence[Any]]
Fleets: TypeAlias = Sequence[tuple[Sequence[Client], int]]
"""The devices, and the seed."""

_LAYER: Candidates = {
    "standardize": (False, True),
    "learning_rate": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "rounds": (20, 40, 80),
    "weight_decay": (1e-4, 1e-3, 1e-2),
}
_ADAPTER: Candidates = {"adapter_size": (0, 256), **_LAYER}
CANDIDATES: Mapping[str, Candidates] = MappingProxyType(
    {
        FedPCL.name: {
            "standardize": (False, True),
            "learning_rate": (3e-5, 1e-4, 3e-4, 1e-3),
            "tau": (0.1, 0.2, 0.4),
            "rounds": (20, 40, 80),
            "projection_size": (256, 512),
            "weight_decay": (1e-4, 1e-3),
        },
        "FedAvg-v": {**_ADAPTER, "epochs": (1, 5), "server_momentum": (0.0, 0.9)},
        "FedRep": {**_LAYER, "epochs": (1, 5)},
        "FedProx": {**_ADAPTER, "epochs": (1, 5), "proximal": (0.01, 0.1)},
        "Solo": _ADAPTER,
        "FedProto": {**_LAYER, "pull": (0.3, 1.0, 3.0)},
        "centralized": _ADAPTER,
        Hierarchical.name: {"directions": (4, 16, 64), "tau": (3.0, 10.0, 30.0)},
    }
)
"""Values of each setting in the order in which they are chosen; benchmarks/reports/accuracy.md lists them."""

COLUMNS = {"method": "<14", "setting": "<18", "value": ">10", "validation": ">12.2%", "best": ">6"}


@click.command("tune")
@repeated(
    "--method",
    "names",
    type=click.Choice(list(CANDIDATES)),
    default=tuple(CANDIDATES),
    help="May be repeated.",
)
@layers_option
@repeated("--shift", "shifts", type=click.Choice(SHIFTS), default=SHIFTS, help="May be repeated.")
@click.option("--backbones", type=click.IntRange(1, 3), default=1, show_default=True, help="How many.")
@click.option(
    "--prior/--no-prior", default=True, show_default=True, help="Whether devices expect their own mixture."
)
@repeated("--seed", "seeds", type=int, default=(0,), help="May be repeated.")
@json_option
def command(
    *,
    names: tuple[str, ...],
    layers: str,
    shifts: tuple[str, ...],
    backbones: int,
    prior: bool,
    seeds: tuple[int, ...],
    json_file: Path | None,
) -> None:
    """Choose the settings of FedPCL and its rivals: the best value of one, then of the next, on validation images."""
    fleets = _fleets(shifts, backbones_of(layers, backbones), seeds)
    table = Table(COLUMNS)
    chosen: dict[str, Settings] = {}
    for name in names:
        first = _first(name, layers, prior=prior)
        for setting, value, settings, accuracy, is_best in search(name, first, fleets, prior=prior):
            table.row(name, setting, f"{value}", accuracy, "*" if is_best else None)
            chosen[name] = settings if is_best else chosen[name]
    write_json(
        json_file,
        "tune",
        tables=[table],
        layers=layers,
        chosen={name: f"{best}" for name, best in chosen.items()},
    )


def _first(name: str, layers: str, *, prior: bool) -> Settings:
    algorithms = {FedPCL.name: FedPCL(prior=prior), Hierarchical.name: Hierarchical(prior=prior)}
    return algorithms.get(name) or recipes_of(deeper=bool(layers))[cast("Method", name)]


def search(
    name: str, settings: Settings, fleets: Fleets, *, prior: bool
) -> Iterator[tuple[str, Any, Settings, float, bool]]:
    """Yield each setting and value tried, all settings, their accuracy, and whether it is above those before."""
    best = accuracy_of(name, settings, fleets, prior=prior)
    yield "", "", settings, best, True
    for setting, values in CANDIDATES[name].items():
        start = settings
        for value in values:
            if value == getattr(start, setting):
                continue
            tried = _replace(start, setting, value)
            accuracy = accuracy_of(name, tried, fleets, prior=prior)
            is_best = accuracy > best
            if is_best:
                best, settings = accuracy, tried
            yield setting, value, tried, accuracy, is_best


def accuracy_of(name: str, settings: Settings, fleets: Fleets, *, prior: bool) -> float:
    """Return the mean over devices, then over fleets."""
    means = []
    for clients, seed in fleets:
        if isinstance(settings, RoundAlgorithm):
            accuracies = eager_accuracies(settings, clients, classes=_classes(clients), seed=seed)
        else:
            accuracies = run_baseline(
                cast("Method", name), clients, settings, classes=_classes(clients), seed=seed, prior=prior
            )
        means.append(accuracies.mean())
    return float(np.mean(means))


def _replace(settings: Settings, setting: str, value: Any) -> Settings:
    if isinstance(settings, RoundAlgorithm):
        return msgspec.structs.replace(settings, **{setting: value})
    return dataclasses.replace(settings, **{setting: value})


def _classes(clients: Sequence[Client]) -> int:
    return int(max(client.test_labels.max() for client in clients)) + 1


def _fleets(shifts: Sequence[str], backbones: Sequence[str], seeds: Sequence[int]) -> Fleets:
    domains = load_domains(DIGITS, backbones, image_size=IMAGE_SIZE, at_most=IMAGES)
    return [
        (
            shifted(
                domains, shift, per_class=PER_CLASS, clients=CLIENTS, concentration=CONCENTRATION, seed=seed,
                validation=True, label_domain=LABEL_DOMAIN,
            ),
            seed,
        )
        for shift in shifts
        for seed in seeds
    ]  # fmt: skip
