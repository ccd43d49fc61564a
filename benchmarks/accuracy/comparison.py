"""Compares algorithms of rounds with baselines on the same fleet."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import click
import numpy as np

from aggregator.algorithms.algorithm import Algorithm
from benchmarks.accuracy.baselines import Method, Recipe, run_baseline, traffic_bytes
from benchmarks.accuracy.rounds import run_rounds
from benchmarks.accuracy.scores import Run
from benchmarks.data.domains import Client
from benchmarks.report import json_option

Option = Callable[[Callable[..., None]], Callable[..., None]]


def compare(
    setting: str,
    clients: Sequence[Client],
    *,
    algorithms: Mapping[str, Algorithm],
    recipes: Mapping[Method, Recipe],
    classes: int,
    seed: int,
) -> Iterator[Run]:
    """Yield a run of every method on a fleet, the algorithms first; recipes are those of the baselines."""
    domains = tuple(client.domain for client in clients)
    methods: dict[str, Algorithm | Recipe] = {
        **algorithms,
        **{str(name): each for name, each in recipes.items()},
    }
    for name, method in methods.items():
        if sys.stderr.isatty():
            click.echo(f"{setting}, seed {seed}: {name}", err=True)
        started = time.perf_counter()
        balanced: dict[str, tuple[float, ...]] = {}
        if isinstance(method, Algorithm):
            outcome = run_rounds(method, clients, classes=classes, seed=seed)
            accuracies = outcome.accuracies
            balanced = {
                "balanced": tuple(outcome.balanced.tolist()),
                "reported": tuple(outcome.reported.tolist()),
            }
            up_bytes, down_bytes = float(np.mean(outcome.up_bytes)), float(np.mean(outcome.down_bytes))
        else:
            accuracies = run_baseline(cast("Method", name), clients, method, classes=classes, seed=seed)
            sizes = {"feature_size": clients[0].train.shape[1], "classes": classes}
            up_bytes = down_bytes = traffic_bytes(cast("Method", name), method, **sizes)
        yield Run(
            setting=setting,
            method=name,
            seed=seed,
            domains=domains,
            accuracies=tuple(accuracies.tolist()),
            **balanced,
            up_bytes=up_bytes,
            down_bytes=down_bytes,
            seconds=time.perf_counter() - started,
        )


def repeated(*names: str, **attributes: Any) -> Option:
    """Return a `click.option` that may be given several times, and shows its default."""
    return click.option(*names, multiple=True, show_default=True, **attributes)


def comparison_options(recipes: Mapping[Method, Recipe]) -> Option:
    """Add the options `--baseline`, `--seed`, `--validation` and `--json`."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in (
            json_option,
            click.option(
                "--validation",
                is_flag=True,
                help="Evaluate on training images that no device has, as for choosing settings.",
            ),
            repeated("--seed", "seeds", type=int, default=(0, 1, 2), help="May be repeated."),
            repeated(
                "--baseline",
                "baselines",
                type=click.Choice([*recipes, "none"]),
                default=tuple(recipes),
                help="Baselines to compare with; may be repeated.",
            ),
        ):
            command = option(command)
        return command

    return add
