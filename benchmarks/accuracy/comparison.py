"""Algorithms of rounds and their rivals on the same fleet."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
import numpy as np

from aggregator.algorithms.program import Algorithm
from benchmarks.accuracy.baselines import Method, Recipe, run_baseline, traffic_bytes
from benchmarks.accuracy.rounds import run_rounds
from benchmarks.accuracy.scores import Run
from benchmarks.data.domains import Client


def compare(
    setting: str,
    clients: Sequence[Client],
    *,
    algorithms: Mapping[str, Algorithm],
    recipes: Mapping[Method, Recipe],
    classes: int,
    seed: int,
) -> Iterator[Run]:
    """Run every method on a fleet.

    Args:
        setting: its name.
        clients: the fleet.
        algorithms: by the name that they are shown under.
        recipes: of the rivals.
        classes: C.
        seed: of the learning.

    Yields:
        A run of each, the algorithms first.
    """
    domains = tuple(client.domain for client in clients)
    for name, algorithm in algorithms.items():
        _tell(setting, name, seed)
        started = time.perf_counter()
        outcome = run_rounds(algorithm, clients, classes=classes, seed=seed)
        yield Run(
            setting=setting,
            method=name,
            seed=seed,
            domains=domains,
            accuracies=tuple(outcome.accuracies.tolist()),
            up_bytes=float(np.mean(outcome.up_bytes)),
            down_bytes=float(np.mean(outcome.down_bytes)),
            seconds=time.perf_counter() - started,
        )
    for method, recipe in recipes.items():
        _tell(setting, method, seed)
        started = time.perf_counter()
        accuracies = run_baseline(method, clients, recipe, classes=classes, seed=seed)
        traffic = traffic_bytes(method, recipe, feature_size=clients[0].train.shape[1], classes=classes)
        yield Run(
            setting=setting,
            method=method,
            seed=seed,
            domains=domains,
            accuracies=tuple(accuracies.tolist()),
            up_bytes=traffic,
            down_bytes=traffic,
            seconds=time.perf_counter() - started,
        )


def _tell(setting: str, method: str, seed: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"{setting}, seed {seed}: {method}", err=True)


def repeated(*names: str, **attributes: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a `click.option` that may be given several times, and shows its default."""
    return click.option(*names, multiple=True, show_default=True, **attributes)
