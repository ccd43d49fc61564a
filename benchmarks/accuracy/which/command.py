"""`python -m benchmarks accuracy which`: every algorithm with its defaults on the same fleets."""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click
import msgspec
import numpy as np

from benchmarks.accuracy.which.methods import NAMES, Trained, train_all
from benchmarks.accuracy.which.scenarios import FASHION, SCENARIOS, Domains
from benchmarks.accuracy.which.tables import Run, groups_of, mean_of, uploads_of, write_tables
from benchmarks.data.domains import load_domains
from benchmarks.options import repeated
from benchmarks.report import Table, commit, json_option, write_json
from protofleet.simulation.algorithms import Logits
from protofleet.simulation.fleet import Client, Features

BACKBONE, IMAGE_SIZE = "mobilenetv2_100", 96
IMAGES = 2000
"""Of each part of a data set of digits, at most."""
TEST_IMAGES = 2000
"""Of each domain, at most; all domains of a fleet have the same number."""

ALGORITHMS = tuple(dict.fromkeys(name.partition(",")[0] for name in NAMES))

COLUMNS = {
    "scenario": "<14", "algorithm": "<30", "seed": ">6", "uploads": ">9", "kB up": ">10,.0f", "kB down": ">10,.0f",
    "all": ">8.1%", "own": ">8.1%", "prior": ">8.1%", "seconds": ">9.1f",
}  # fmt: skip


@click.command("which")
@repeated(
    "--scenario",
    "names",
    type=click.Choice(list(SCENARIOS)),
    default=tuple(SCENARIOS),
    help="May be repeated.",
)
@repeated(
    "--algorithm",
    "algorithms",
    type=click.Choice(ALGORITHMS),
    default=ALGORITHMS,
    help="May be repeated.",
)
@click.option(
    "--layers",
    metavar="LAYER,...",
    default="",
    help="Blocks of the backbone, such as c384,c576.  [default: last]",
)
@repeated("--seed", "seeds", type=int, default=(0, 1, 2), help="Of the devices' images; may be repeated.")
@click.option(
    "--resume",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File that --json wrote earlier: its runs are not repeated, and are in the tables and in the new file.",
)
@click.option(
    "--markdown",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Write the tables into this page, such as benchmarks/reports/which-algorithm.md; other scenarios stay.",
)
@json_option
def command(
    *,
    names: tuple[str, ...],
    algorithms: tuple[str, ...],
    layers: str,
    seeds: tuple[int, ...],
    resume: Path | None,
    markdown: Path | None,
    json_file: Path | None,
) -> None:
    """Compare all algorithms, with their defaults, on fleets that differ in different ways."""
    table = Table(COLUMNS)
    if resume and json.loads(resume.read_text(encoding="utf-8")).get("layers", "") != layers:
        raise click.UsageError(f"{resume} has other layers: give the same --layers")
    runs = {_key(run): run for run in (stored_runs(resume) if resume else ())}
    rows = [row for row in NAMES if row.partition(",")[0] in algorithms]
    for seed in seeds:
        for name in names:
            missing = [row for row in rows if (name, row, seed) not in runs]
            for run in _runs(name, seed, missing, layers) if missing else ():
                runs[_key(run)] = run
                table.row(*_cells([run], seed))
                _store(json_file, runs.values(), layers)
    for each in groups_of(runs.values()).values():
        table.row(*_cells(each, "mean"))
    _store(json_file, runs.values(), layers)
    if markdown:
        write_tables(markdown, runs.values())


def _key(run: Run) -> tuple[str, str, int]:
    return run.scenario, run.algorithm, run.seed


def stored_runs(file: Path) -> list[Run]:
    """Return the runs of a file that `--json` wrote."""
    return msgspec.convert(json.loads(file.read_text(encoding="utf-8"))["runs"], list[Run])


def _store(file: Path | None, runs: Collection[Run], layers: str) -> None:
    write_json(file, "which", backbone=BACKBONE, layers=layers, runs=[asdict(run) for run in runs])


def _runs(name: str, seed: int, rows: Collection[str], layers: str) -> Iterator[Run]:
    scenario = SCENARIOS[name]
    domains = load_domains(
        scenario.domains,
        [f"{BACKBONE}:{layers}" if layers else BACKBONE],
        image_size=IMAGE_SIZE,
        at_most=None if scenario.domains == (FASHION,) else IMAGES,
    )
    classes = next(iter(domains.values())).classes
    clients = judged_by_all(scenario.clients(_with_fewer_tests(domains), seed))
    for row, trained in train_all(clients, classes=classes, prior=scenario.shift == "label", names=rows):
        yield _run(name, row, seed, clients, trained)


def _with_fewer_tests(domains: Domains) -> dict[str, Features]:
    """Return domains with the same number of test images each, the same ones for every seed."""
    number = min(TEST_IMAGES, *(len(domain.test) for domain in domains.values()))
    chosen = {
        name: np.random.default_rng(0).permutation(len(domain.test))[:number]
        for name, domain in domains.items()
    }
    return {
        name: replace(domain, test=domain.test[chosen[name]], test_labels=domain.test_labels[chosen[name]])
        for name, domain in domains.items()
    }


def judged_by_all(clients: Sequence[Client]) -> list[Client]:
    """Give all clients the test images of all domains; those of other domains have no weight."""
    domains = {client.domain: client for client in clients}
    test = np.concatenate([each.test for each in domains.values()])
    labels = np.concatenate([each.test_labels for each in domains.values()])
    return [
        replace(
            client,
            test=test,
            test_labels=labels,
            weights=np.concatenate(
                [
                    client.weights if name == client.domain else np.zeros(len(each.test_labels))
                    for name, each in domains.items()
                ]
            ),
        )
        for client in clients
    ]


def _run(scenario: str, algorithm: str, seed: int, clients: Sequence[Client], trained: Trained) -> Run:
    def accuracies(logits: Logits, of: Callable[..., float]) -> tuple[float, ...]:
        return tuple(
            of(client, mine.argmax(axis=1)) for client, mine in zip(clients, logits, strict=bool(logits))
        )

    return Run(
        scenario=scenario,
        algorithm=algorithm,
        seed=seed,
        everywhere=accuracies(trained.logits, Client.balanced_accuracy),
        own=accuracies(trained.logits, Client.accuracy),
        own_with_prior=accuracies(trained.with_prior, Client.accuracy),
        uploads=trained.uploads,
        up_bytes=trained.up_bytes,
        down_bytes=trained.down_bytes,
        seconds=trained.seconds,
        commit=commit(),
    )


def _cells(runs: Sequence[Run], seed: int | str) -> tuple[object, ...]:
    """Return a row on stdout: means over the seeds."""
    first = runs[0]
    return (
        *(first.scenario, first.algorithm, seed, uploads_of(runs)),
        *(mean_of(runs, "up_bytes") / 1e3, mean_of(runs, "down_bytes") / 1e3),
        *(mean_of(runs, "everywhere"), mean_of(runs, "own")),
        mean_of(runs, "own_with_prior") if first.own_with_prior else None,
        mean_of(runs, "seconds"),
    )
