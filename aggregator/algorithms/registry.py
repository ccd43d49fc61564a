"""The algorithms by name: this package's, and the ones that other distributions bring by an entry point.

A distribution names the class of its algorithm in the group `protofleet.algorithms`. It is imported when a task, a job
or a simulation uses it, and never otherwise.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from aggregator.algorithms.algorithm import Algorithm, OneShot, RoundAlgorithm
from aggregator.algorithms.fedncm import FedNCM
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.fedtc.train_head import FedTC
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.hierarchical import Hierarchical
from aggregator.algorithms.statistics.feature_map import Statistics
from protocol.errors import ConfigError

GROUP = "protofleet.algorithms"

ALGORITHMS: dict[str, type[Algorithm]] = {
    kind.name: kind for kind in (FedTC, Statistics, FedNCM, FedPCL, FPL, FedProto, Hierarchical)
}
"""Each algorithm of this package by the name that the task file gives it."""


@cache
def installed() -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of other distributions by name; several of one name clash."""
    entries: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=GROUP):
        entries[entry.name] = (*entries.get(entry.name, ()), entry)
    return entries


def known_algorithms() -> tuple[str, ...]:
    return tuple(dict.fromkeys((*ALGORITHMS, *sorted(installed()))))


def distributions(name: str) -> str:
    """Return the distributions that bring an algorithm of this name, with their versions."""
    owners = (entry.dist for entry in installed().get(name, ()))
    return " and ".join(f"{owner.name} {owner.version}" for owner in owners if owner is not None)


def find_algorithm(name: str) -> type[Algorithm]:
    """Return an algorithm's class; one of this package precedes others of its name.

    Raises:
        ConfigError: no distribution has the algorithm, several have it, or it cannot be imported or used.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    entries = installed().get(name, ())
    if not entries:
        raise ConfigError(
            f"no algorithm {name!r}: expected one of {', '.join(known_algorithms())}, or install the package of another"
        )
    if len(entries) > 1:
        raise ConfigError(
            f"algorithm {name!r} is in several packages, {distributions(name)}: uninstall all but one"
        )
    try:
        kind = entries[0].load()
    except Exception as error:
        raise _unusable(name, f"{type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, OneShot | RoundAlgorithm)):
        raise _unusable(name, f"expected a subclass of OneShot or RoundAlgorithm, got {kind!r}")
    if (own := getattr(kind, "name", None)) != name:
        raise _unusable(name, f"its class has the name {own!r}, and its entry point {name!r}")
    if required := [field.name for field in msgspec.structs.fields(kind) if field.required]:
        raise _unusable(name, f"expected a default for each setting, and {', '.join(required)} has none")
    return kind


def _unusable(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"cannot use algorithm {name!r} of {distributions(name)}: {reason}; update that package, or ask its authors"
    )


def configured(name: str, settings: Mapping[str, Any]) -> Algorithm:
    """Return an algorithm with settings as `msgspec.to_builtins` returns them; raises what `find_algorithm` does."""
    return msgspec.convert(settings, find_algorithm(name))
