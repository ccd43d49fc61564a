"""Runs of the comparison, and their tables in a page."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.accuracy.which.methods import FEDTC, NAMES
from benchmarks.accuracy.which.scenarios import SCENARIOS

BEGIN, END = (
    "<!-- python -m benchmarks accuracy which: begin -->",
    "<!-- python -m benchmarks accuracy which: end -->",
)
"""Lines of a page between which `--markdown` writes."""

HEADINGS = (
    "| algorithm | uploads | kB up | kB down | all test images | own share | with the prior | time | seeds | "
    "commit |"
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One algorithm on one fleet, with accuracies of each client's own head, in the order of the clients."""

    scenario: str
    algorithm: str
    seed: int
    everywhere: tuple[float, ...]
    """On the test images of all domains, all classes alike."""
    own: tuple[float, ...]
    """On the test images of the client's domain, in its own mixture of classes."""
    own_with_prior: tuple[float, ...]
    """Likewise, with the class prior of its own images; empty if not measured."""
    uploads: int
    up_bytes: float
    down_bytes: float
    seconds: float
    commit: str = ""
    """Of the code that ran."""


def groups_of(runs: Collection[Run]) -> dict[tuple[str, str], list[Run]]:
    """Return the runs of each scenario and algorithm, in the order of the tables."""
    groups = {
        (scenario, row): [run for run in runs if (run.scenario, run.algorithm) == (scenario, row)]
        for scenario in SCENARIOS
        for row in NAMES
    }
    return {key: sorted(group, key=lambda run: run.seed) for key, group in groups.items() if group}


def mean_of(runs: Sequence[Run], name: str) -> float:
    """Return a figure's mean over devices and seeds."""
    return float(np.mean([np.mean(getattr(run, name)) for run in runs]))


def uploads_of(runs: Sequence[Run]) -> str:
    """Return the numbers of uploads, which may differ between seeds."""
    return " or ".join(map(str, sorted({run.uploads for run in runs})))


def write_tables(page: Path, runs: Collection[Run]) -> None:
    """Write the means of all runs between BEGIN and END of a page; the tables there of other scenarios stay."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    sections = {each.partition("\n")[0]: each.rstrip() for each in old.split("\n### ")[1:]}
    for name in {run.scenario for run in runs}:
        section = "\n".join(_section(name, [run for run in runs if run.scenario == name]))
        sections[SCENARIOS[name].title] = section
    titles = (scenario.title for scenario in SCENARIOS.values())
    text = "\n".join(f"\n### {sections[title]}" for title in titles if title in sections)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def _section(name: str, runs: Sequence[Run]) -> Iterator[str]:
    """Yield the lines of a scenario, from its title on."""
    scenario = SCENARIOS[name]
    units = {run.seed: run.seconds for run in runs if run.algorithm == FEDTC}
    yield f"{scenario.title}\n\n{scenario.text}\n"
    yield f"{HEADINGS}\n|{'---|' * HEADINGS.count(' | ')}---|"
    for (_, algorithm), each in groups_of(runs).items():
        yield _line(algorithm, each, shift=scenario.shift, units=units)


def _line(algorithm: str, runs: Sequence[Run], *, shift: str, units: Mapping[int, float]) -> str:
    """Return a row of a page; one accuracy where all are the same by design.

    `units` are FedTC's seconds by seed; a row without FedTC's of all its seeds has no time.
    """
    traffic: tuple[str, ...] = ("", "", "")
    if runs[0].uploads:
        traffic = (
            uploads_of(runs),
            *(f"{mean_of(runs, name) / 1e3:,.0f}" for name in ("up_bytes", "down_bytes")),
        )
    shown = {"everywhere": True, "own": shift != "none", "own_with_prior": shift == "label"}
    accuracies = [_accuracy(runs, name) if show else "" for name, show in shown.items()]
    seeds = [run.seed for run in runs]
    time = ""
    if units.keys() >= set(seeds):
        time = f"{sum(run.seconds for run in runs) / sum(units[seed] for seed in seeds):.1f}"
    measured = (", ".join(map(str, seeds)), ", ".join(dict.fromkeys(run.commit for run in runs)))
    cells = (algorithm, *traffic, *accuracies, time, *measured)
    return f"| {' | '.join(cells)} |"


def _accuracy(runs: Sequence[Run], name: str) -> str:
    """Return the mean over devices and seeds in percent, and the standard deviation over several seeds."""
    means = [100 * np.mean(getattr(run, name)) for run in runs if getattr(run, name)]
    if not means:
        return ""
    return f"{np.mean(means):.1f}" + (f" ± {np.std(means):.1f}" if len(means) > 1 else "")
