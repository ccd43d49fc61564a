"""`python -m research fpl`: FPL and baselines where domains differ and have unequal numbers of devices."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import msgspec

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.fpl import FPL
from benchmarks.data.domains import PLANS, load_domains, planned
from benchmarks.data.features import BackboneType
from benchmarks.options import repeated
from research.rounds.baselines import Method, Recipe
from research.rounds.comparison import Prior, compare, comparison_options, hierarchical
from research.rounds.scores import Run, by_method, show, write_report

IMAGE_SIZE = 96
IMAGES = 2000
"""Most images of each part of a domain's data set."""

PRINTED = {"tau": 0.02, "learning_rate": 0.01, "regularization": 1.0, "standardize": False}
"""The paper's settings; its regularizer is that of the published code, a 256th of the printed one."""

_RECIPE = Recipe(
    rounds=40,
    epochs=5,
    batch_size=64,
    optimizer="sgd",
    learning_rate=0.1,
    weight_decay=1e-5,
    standardize=True,
    adapter_size=256,
)
_SLOWER = replace(_RECIPE, learning_rate=0.03)
RECIPES: Mapping[Method, Recipe] = MappingProxyType(
    {
        "Solo": _SLOWER,
        "FedAvg-v": _RECIPE,
        "FedProx": _RECIPE,
        "FedRep": _SLOWER,
        "FedProto": _SLOWER,
        "FedProto averaged": _SLOWER,
        "centralized": replace(_RECIPE, learning_rate=0.01),
    }
)
"""Best recipe of each baseline on validation images; benchmarks/reports/accuracy.md lists the candidates."""

COLUMNS = ("domain_mean", "worst_domain", "up_bytes", "down_bytes")


@click.command("fpl")
@repeated(
    "--data", type=click.Choice(list(PLANS)), default=tuple(PLANS), help="Which domains; may be repeated."
)
@repeated(
    "--backbone",
    "backbones",
    type=BackboneType(),
    default=("mobilenetv2_100",),
    help="May be repeated: their features are concatenated.",
)
@click.option("--rounds", type=click.IntRange(min=1), help="Of FPL.  [default: its own]")
@click.option(
    "--regularization",
    "regularizations",
    type=click.FloatRange(min=0),
    multiple=True,
    help="Weights to try beside FPL's own; may be repeated.",
)
@click.option("--printed", is_flag=True, help="FPL as printed, too.")
@comparison_options(RECIPES, priors=("without",))
def command(
    *,
    data: tuple[str, ...],
    backbones: tuple[str, ...],
    baselines: tuple[str, ...],
    priors: tuple[Prior, ...],
    seeds: tuple[int, ...],
    validation: bool,
    json_file: Path | None,
    **fpl: Any,
) -> None:
    """Compare FPL with baselines on domains of unequal size."""
    algorithms = _algorithms(**fpl) | hierarchical(baselines, priors)
    recipes = {method: recipe for method, recipe in RECIPES.items() if method in baselines}
    runs: list[Run] = []
    tables = []
    for name in data:
        plan = PLANS[name]
        domains = load_domains(
            list(plan), backbones, image_size=IMAGE_SIZE, at_most=IMAGES if name == "digits" else None
        )
        classes = next(iter(domains.values())).classes
        mine: list[Run] = []
        for seed in seeds:
            clients = planned(name, domains, seed=seed, validation=validation)
            mine += compare(
                name,
                clients,
                algorithms=algorithms,
                recipes=recipes,
                priors=priors,
                classes=classes,
                seed=seed,
            )
        runs += mine
        columns = [*COLUMNS[:2], *(f"domain:{domain}" for domain in plan), *COLUMNS[2:]]
        tables.append(show(f"{name}, {len(mine[0].domains)} devices", by_method(mine), columns))
    write_report(json_file, "fpl", {"backbones": backbones, "validation": validation}, runs, tables)


def _algorithms(
    *, rounds: int | None, regularizations: tuple[float, ...], printed: bool
) -> dict[str, RoundAlgorithm]:
    """Return what to compare, by name."""
    given = {} if rounds is None else {"rounds": rounds}
    variants: dict[str, dict[str, float]] = {"FPL": {}}
    variants |= {f"FPL, regularization {weight:g}": {"regularization": weight} for weight in regularizations}
    if printed:
        variants["FPL as printed"] = PRINTED
    return {name: msgspec.convert({**given, **settings}, FPL) for name, settings in variants.items()}
