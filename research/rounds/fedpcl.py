"""`python -m research fedpcl`: FedPCL and baselines where devices' features, labels or both differ."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import click
import msgspec

from aggregator.algorithms.fedpcl import FedPCL
from benchmarks.data.domains import LABEL_DOMAIN, SHIFTS, load_domains, shifted
from benchmarks.data.images import DIGITS, NAMES, PAIRED
from benchmarks.options import repeated
from benchmarks.report import Table
from research.rounds.baselines import ADAM, ALONE, ALONE_DEEPER, Method, Recipe
from research.rounds.comparison import Prior, compare, comparison_options, hierarchical, named
from research.rounds.scores import Run, by_method, show, write_report

if TYPE_CHECKING:
    from aggregator.algorithms.algorithm import RoundAlgorithm

BACKBONES = ("mobilenetv2_100", "mobilenetv2_100_birds", "mobilenetv2_100_insects")
"""One architecture trained on three sources, which is FedPCL's setting."""

IMAGE_SIZE = 96
RECIPES: Mapping[Method, Recipe] = MappingProxyType(
    {
        "Solo": ALONE,
        "FedAvg-v": ADAM,
        "FedProx": replace(ADAM, proximal=0.01),
        "FedRep": replace(ADAM, learning_rate=3e-4),
        "FedProto": ALONE,
        "centralized": ALONE,
    }
)
"""Best recipe of each baseline on validation images, one for all settings; `reports/accuracy.md` has the candidates."""

_DEEPER = replace(ADAM, rounds=20, weight_decay=1e-3, learning_rate=3e-3, adapter_size=0)
DEEPER_RECIPES: Mapping[Method, Recipe] = MappingProxyType(
    {
        "Solo": ALONE_DEEPER,
        "FedAvg-v": replace(_DEEPER, rounds=40, weight_decay=1e-2),
        "FedProx": replace(_DEEPER, proximal=0.01),
        "FedRep": replace(ADAM, rounds=20),
        "FedProto": replace(ADAM, learning_rate=3e-3),
        "centralized": replace(ALONE, rounds=80, learning_rate=1e-2, adapter_size=0),
    }
)
"""The same for the blocks c384 and c576 of the backbones, by `python -m research tune`."""

DEEPER_FEDPCL = {"learning_rate": 3e-4}
"""FedPCL's best settings there; its defaults are those for the last layer."""

COLUMNS = (
    "mean",
    "balanced",
    "reported",
    "worst_10",
    "worst_20",
    "worst_40",
    "best_10",
    "variance",
    "up_bytes",
    "down_bytes",
)


layers_option = click.option(
    "--layers",
    metavar="LAYER,...",
    default="",
    help="Blocks of every backbone in place of its last layer, as of `export-backbone --layers`, such as c384,c576.",
)


def backbones_of(layers: str, number: int) -> list[str]:
    """Return the first so many of BACKBONES, with these layers if there are any."""
    return [f"{name}:{layers}" if layers else name for name in BACKBONES[:number]]


def recipes_of(*, deeper: bool) -> Mapping[Method, Recipe]:
    """Return the baselines' recipes for features of hidden layers, or of the last one."""
    return DEEPER_RECIPES if deeper else RECIPES


@click.command("fedpcl")
@repeated(
    "--shift",
    "shifts",
    type=click.Choice(SHIFTS),
    default=SHIFTS,
    help="What differs from device to device; may be repeated.",
)
@repeated(
    "--backbones",
    type=click.IntRange(1, len(BACKBONES)),
    default=(1, len(BACKBONES)),
    help="How many; may be repeated.",
)
@layers_option
@click.option(
    "--per-class",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Images of a class for each device, or on average where labels differ.",
)
@click.option(
    "--clients", type=click.IntRange(min=2), default=10, show_default=True, help="With label shift alone."
)
@click.option(
    "--concentration",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Of the Dirichlet distribution of labels.",
)
@click.option(
    "--data",
    type=click.Choice([*NAMES, *DIGITS, "pacs_photo"]),
    default=LABEL_DOMAIN,
    show_default=True,
    help="Of devices with label shift alone.",
)
@click.option("--rounds", type=click.IntRange(min=1), help="Of FedPCL.  [default: its own]")
@click.option(
    "--max-sets",
    type=click.IntRange(min=1),
    multiple=True,
    help="Also limit the sets of prototypes that are sent; may be repeated.",
)
@comparison_options(RECIPES, priors=get_args(Prior))
@click.option(
    "--images",
    type=click.IntRange(1, PAIRED),
    default=2000,
    show_default=True,
    help="Of each part of a data set, at most.",
)
def command(
    *,
    shifts: tuple[str, ...],
    backbones: tuple[int, ...],
    layers: str,
    per_class: int,
    clients: int,
    concentration: float,
    data: str,
    baselines: tuple[str, ...],
    priors: tuple[Prior, ...],
    seeds: tuple[int, ...],
    images: int,
    validation: bool,
    json_file: Path | None,
    **fedpcl: Any,
) -> None:
    """Compare FedPCL with baselines on four data sets of digits."""
    algorithms: dict[str, RoundAlgorithm] = {
        named(name, prior): settings
        for prior in priors
        for name, settings in _algorithms(**fedpcl, prior=prior == "with", deeper=bool(layers)).items()
    }
    algorithms |= hierarchical(baselines, priors)
    recipes = {
        method: recipe for method, recipe in recipes_of(deeper=bool(layers)).items() if method in baselines
    }
    runs: list[Run] = []
    tables: list[Table] = []
    for number in backbones:
        for shift in shifts:
            names = (data,) if shift == "label" else DIGITS
            domains = load_domains(names, backbones_of(layers, number), image_size=IMAGE_SIZE, at_most=images)
            classes = next(iter(domains.values())).classes
            setting = f"{shift} shift, {number} backbone{'s' if number > 1 else ''}"
            mine: list[Run] = []
            for seed in seeds:
                fleet = shifted(
                    domains,
                    shift,
                    per_class=per_class,
                    clients=clients,
                    concentration=concentration,
                    seed=seed,
                    validation=validation,
                    label_domain=data,
                )
                mine += compare(
                    setting,
                    fleet,
                    algorithms=algorithms,
                    recipes=recipes,
                    priors=priors,
                    classes=classes,
                    seed=seed,
                )
            runs += mine
            tables.append(_show(setting, mine, by_domain=shift == "feature"))
    settings = {
        "layers": layers, "per_class": per_class, "concentration": concentration, "validation": validation,
    }  # fmt: skip
    write_report(json_file, "fedpcl", settings, runs, tables)


def _algorithms(
    *,
    rounds: int | None,
    max_sets: Sequence[int],
    prior: bool,
    deeper: bool,
) -> dict[str, FedPCL]:
    """Return what to compare, by name."""
    given: dict[str, Any] = {"prior": prior} | ({} if rounds is None else {"rounds": rounds})
    asked: dict[str, dict[str, Any]] = {"FedPCL": {}}
    asked |= {f"FedPCL, {count} sets": {"max_sets": count} for count in max_sets}
    if deeper:
        asked["FedPCL, tuned"] = DEEPER_FEDPCL
    return {name: msgspec.convert({**given, **settings}, FedPCL) for name, settings in asked.items()}


def _show(setting: str, runs: Sequence[Run], *, by_domain: bool) -> Table:
    domains = [f"domain:{name}" for name in dict.fromkeys(runs[0].domains)] if by_domain else []
    return show(setting, by_method(runs), [COLUMNS[0], *domains, *COLUMNS[1:]])
