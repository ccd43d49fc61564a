"""Compares algorithms of rounds with baselines on the same fleet."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import click
import numpy as np

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.hierarchical import Hierarchical
from benchmarks.options import Option, repeated
from benchmarks.report import json_option
from protofleet.simulation.fleet import Client
from research.rounds.baselines import Method, Recipe, run_baseline, traffic_bytes
from research.rounds.heads import run_rounds
from research.rounds.scores import Run

Prior: TypeAlias = Literal["without", "with"]


def compare(
    setting: str,
    clients: Sequence[Client],
    *,
    algorithms: Mapping[str, RoundAlgorithm],
    recipes: Mapping[Method, Recipe],
    priors: Sequence[Prior],
    classes: int,
    seed: int,
) -> Iterator[Run]:
    """Yield a run of every method on a fleet, the algorithms first; recipes are those of the baselines."""
    domains = tuple(client.domain for client in clients)
    methods: dict[str, RoundAlgorithm | tuple[Method, Recipe, Prior]] = {
        **algorithms,
        **{named(name, prior): (name, recipe, prior) for name, recipe in recipes.items() for prior in priors},
    }
    for name, method in methods.items():
        if sys.stderr.isatty():
            click.echo(f"{setting}, seed {seed}: {name}", err=True)
        started = time.perf_counter()
        balanced: dict[str, tuple[float, ...]] = {}
        if isinstance(method, RoundAlgorithm):
            outcome = run_rounds(method, clients, classes=classes, seed=seed)
            accuracies = outcome.accuracies
            balanced = {
                "balanced": tuple(outcome.balanced.tolist()),
                "reported": tuple(outcome.reported.tolist()),
            }
            up_bytes, down_bytes = float(np.mean(outcome.up_bytes)), float(np.mean(outcome.down_bytes))
        else:
            baseline, recipe, prior = method
            accuracies = run_baseline(
                baseline, clients, recipe, classes=classes, seed=seed, prior=prior == "with"
            )
            sizes = {"feature_size": clients[0].train.shape[1], "classes": classes}
            up_bytes = down_bytes = traffic_bytes(baseline, recipe, **sizes)
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


def hierarchical(names: Sequence[str], priors: Sequence[Prior]) -> dict[str, RoundAlgorithm]:
    """Return the settings of hierarchical Gaussian prototypes by name, if they are among the names."""
    return {
        named(Hierarchical.name, prior): Hierarchical(prior=prior == "with")
        for prior in priors
        if Hierarchical.name in names
    }


def named(method: str, prior: Prior) -> str:
    """Return a method's name in tables."""
    return f"{method}, prior" if prior == "with" else method


def comparison_options(recipes: Mapping[Method, Recipe], *, priors: Sequence[Prior]) -> Option:
    """Add the options `--baseline`, `--prior`, `--seed`, `--validation` and `--json`; `priors` are the default."""

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
                type=click.Choice([*recipes, Hierarchical.name, "none"]),
                default=(*recipes, Hierarchical.name),
                help="Methods to compare with; may be repeated.",
            ),
            repeated(
                "--prior",
                "priors",
                type=click.Choice(get_args(Prior)),
                default=tuple(priors),
                help="Methods that know how often each class is among the device's images, or do not; may be repeated.",
            ),
        ):
            command = option(command)
        return command

    return add
