"""Accuracies of fleets: of every client, of the worst and best of them, and over seeds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Table, write_json


@dataclass(frozen=True, kw_only=True)
class Run:
    """One method on one fleet, with the domain and the accuracy of each client."""

    setting: str
    method: str
    seed: int
    domains: tuple[str, ...]
    accuracies: tuple[float, ...]
    balanced: tuple[float, ...] = ()
    """The accuracy of each client over all classes alike; empty for a baseline."""
    reported: tuple[float, ...] = ()
    """`balanced` as `status` shows it."""
    up_bytes: float
    """Bytes from a device in a round, mean over devices and rounds."""
    down_bytes: float
    """Bytes to a device in a round, mean over rounds."""
    seconds: float

    @property
    def mean(self) -> float:
        """Mean over the clients."""
        return float(np.mean(self.accuracies))

    @property
    def by_domain(self) -> dict[str, float]:
        """Mean over the clients of each domain."""
        pairs = list(zip(self.domains, self.accuracies, strict=True))
        return {
            name: float(np.mean([accuracy for domain, accuracy in pairs if domain == name]))
            for name in dict.fromkeys(self.domains)
        }


def spread(accuracies: Sequence[float]) -> dict[str, float]:
    """Return the figures of tables 12 and 13 of FedPCL: worst 10, 20 and 40 %, best 10 % and variance over clients.

    A share of the clients is at least one of them.
    """
    ordered = np.sort(accuracies)

    def few(share: float) -> int:
        return max(1, math.ceil(share * len(ordered)))

    worst = {f"worst_{percent}": float(ordered[: few(percent / 100)].mean()) for percent in (10, 20, 40)}
    return {**worst, "best_10": float(ordered[-few(0.1) :].mean()), "variance": float(ordered.var())}


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the means over seeds of one method's runs, and standard deviations of accuracies over seeds."""
    means = [run.mean for run in runs]
    domain_means = [float(np.mean(list(run.by_domain.values()))) for run in runs]
    worst = [min(run.by_domain.values()) for run in runs]
    return {
        "setting": runs[0].setting,
        "method": runs[0].method,
        "seeds": [run.seed for run in runs],
        "mean": float(np.mean(means)),
        "deviation": float(np.std(means)),
        **{
            name: float(np.mean([getattr(run, name) for run in runs])) if getattr(runs[0], name) else None
            for name in ("balanced", "reported")
        },
        "clients": np.mean([run.accuracies for run in runs], axis=0).tolist(),
        **_mean_of(spread(run.accuracies) for run in runs),
        "domains": _mean_of(run.by_domain for run in runs),
        "domain_mean": float(np.mean(domain_means)),
        "domain_deviation": float(np.std(domain_means)),
        "worst_domain": float(np.mean(worst)),
        "worst_domain_deviation": float(np.std(worst)),
        **{
            name: float(np.mean([getattr(run, name) for run in runs]))
            for name in ("up_bytes", "down_bytes", "seconds")
        },
    }


def _mean_of(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    rows = list(figures)
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def by_method(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the summaries of all runs, in the order of first appearance."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.setting, run.method), []).append(run)
    return [summary(group) for group in groups.values()]


def write_report(
    file: Path | None,
    benchmark: str,
    setting: Mapping[str, Any],
    runs: Sequence[Run],
    tables: Sequence[Table],
) -> None:
    """Write every run, the summaries and their tables as JSON, if there is a file."""
    every = [{**asdict(run), "mean": run.mean, **spread(run.accuracies)} for run in runs]
    write_json(file, benchmark, tables=tables, **setting, summaries=by_method(runs), runs=every)


def show(setting: str, summaries: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    """Print and return a table of summaries: accuracies in percent, bytes as they are; "domain:NAME" is a domain."""
    names = [column.removeprefix("domain:").replace("_", " ") for column in columns]
    table = Table({"method": "<28", **dict.fromkeys(names, ">18")}, title=setting)
    for figures in summaries:
        table.row(figures["method"], *(_cell(figures, column) for column in columns))
    return table


def _cell(figures: Mapping[str, Any], column: str) -> str:
    if column.startswith("domain:"):
        return f"{100 * figures['domains'][column.removeprefix('domain:')]:.1f}"
    value = figures[column]
    if value is None:
        return ""
    if column.endswith("bytes") or column == "seconds":
        return f"{value:,.0f}"
    if column == "variance":
        return f"{1e4 * value:.1f}"
    deviation = {"mean": "deviation", "domain_mean": "domain_deviation"}.get(column, f"{column}_deviation")
    return f"{100 * value:.1f}" + (f" ± {100 * figures[deviation]:.1f}" if deviation in figures else "")
