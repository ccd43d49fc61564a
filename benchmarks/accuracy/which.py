"""`python -m benchmarks accuracy which`: every algorithm with its defaults on the same fleets."""

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

import click
import msgspec
import numpy as np
import torch
from msgspec import structs

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.fedtc.train_head import FedTC
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.hierarchical import Hierarchical
from aggregator.algorithms.layers import log_prior
from aggregator.config.schema import Client as ClientSettings
from benchmarks.accuracy import baselines
from benchmarks.data.domains import feature_shift, load_domains, planned, shifted, unequal
from benchmarks.data.images import DIGITS
from benchmarks.options import repeated, resume_option
from benchmarks.report import Table, commit, json_option, write_json
from protofleet.simulation import algorithms
from protofleet.simulation.algorithms import SEED, Logits
from protofleet.simulation.fleet import Client, Features

FEDTC = "fedtc"
STATISTICS = "statistics"
SINGLE_IMAGES = "statistics, `batch_size = 1`"
ALONE = "each device alone"
ALL_FEATURES = "all features in one place"

IN_ROUNDS: tuple[RoundAlgorithm, ...] = (Hierarchical(), FedPCL(), FPL(), FedProto())

NAMES = (
    *(FEDTC, STATISTICS, SINGLE_IMAGES),
    *(algorithm.name for algorithm in IN_ROUNDS),
    *(ALONE, ALL_FEATURES),
)
"""Rows of the tables, in their order; before a comma, the algorithm's name."""


@dataclass(frozen=True, kw_only=True)
class Trained(algorithms.Trained):
    """The heads that an algorithm makes for a fleet, and their cost."""

    with_prior: Logits = ()
    """As `logits`, with the class prior of the client's own images; empty if the client's training has it anyway."""


def train_all(
    clients: Sequence[Client], *, classes: int, prior: bool, names: Collection[str] = NAMES
) -> Iterator[tuple[str, Trained]]:
    """Yield what each algorithm makes of a fleet, by its name in tables; all clients have the same test images.

    Without `prior` there is no `with_prior` of an algorithm that would have to train again for it.
    """
    if FEDTC in names:
        yield FEDTC, _one_head(algorithms.train_prototypes(FedTC(), clients), clients)
    for name, batch_size in ((STATISTICS, ClientSettings().batch_size), (SINGLE_IMAGES, 1)):
        if name in names:
            yield name, _one_head(algorithms.train_statistics(clients, batch_size=batch_size), clients)
    for algorithm in IN_ROUNDS:
        if algorithm.name in names:
            yield algorithm.name, _rounds(algorithm, clients, classes=classes, prior=prior)
    if ALONE in names:
        yield ALONE, _alone(clients, classes=classes)
    if ALL_FEATURES in names:
        yield ALL_FEATURES, _one_head(algorithms.train_in_one_place(clients), clients)


def _rounds(algorithm: RoundAlgorithm, clients: Sequence[Client], *, classes: int, prior: bool) -> Trained:
    trained = algorithms.train_rounds(algorithm, clients, classes=classes)
    with_prior: Logits = ()
    if isinstance(algorithm, FPL):
        with_prior = _add_prior(trained.logits, clients)
    elif isinstance(algorithm, Hierarchical | FedPCL) and prior:
        with_prior = algorithms.train_rounds(
            structs.replace(algorithm, prior=True), clients, classes=classes
        ).logits
    return Trained(**vars(trained), with_prior=with_prior)


def _alone(clients: Sequence[Client], *, classes: int) -> Trained:
    started_s = time.process_time()
    recipe = baselines.ALONE_DEEPER if clients[0].normalized else baselines.ALONE
    logits = baselines.alone_logits(clients, recipe, classes=classes, seed=SEED)
    return Trained(logits=logits, seconds=time.process_time() - started_s)


def _one_head(trained: algorithms.Trained, clients: Sequence[Client]) -> Trained:
    """Return the result of an algorithm that makes one head for all clients."""
    return Trained(**vars(trained), with_prior=_add_prior(trained.logits, clients))


def _add_prior(logits: Logits, clients: Sequence[Client]) -> Logits:
    """Add the logarithm of each class's share of a client's images to the client's logits."""
    classes = logits[0].shape[1]
    counts = [np.bincount(client.train_labels, minlength=classes) for client in clients]
    priors = [log_prior(torch.from_numpy(count).float()).numpy() for count in counts]
    return [mine + prior for mine, prior in zip(logits, priors, strict=True)]


FASHION = "fashion_mnist"

Domains = Mapping[str, Features]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A kind of fleet."""

    title: str
    text: str
    """The devices and their images."""
    shift: str
    """The difference between devices: "none", "label" or "feature"."""
    domains: tuple[str, ...]
    clients: Callable[[Domains, int], list[Client]]
    """Makes the clients, by the domains' features and the seed."""


def _alike(devices: int, images: int) -> Callable[[Domains, int], list[Client]]:
    plan = {FASHION: (devices, images)}
    return lambda domains, seed: unequal(domains, plan, rng=np.random.default_rng(seed), validation=False)


def _by_label(per_class: int) -> Callable[[Domains, int], list[Client]]:
    return lambda domains, seed: shifted(
        domains, "label", per_class=per_class, clients=10, concentration=0.1, seed=seed, label_domain=FASHION
    )


def _by_domain(per_class: int) -> Callable[[Domains, int], list[Client]]:
    return lambda domains, seed: feature_shift(
        domains, per_class=per_class, rng=np.random.default_rng(seed), validation=False
    )


SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        "alike-few": Scenario(
            title="Like devices, few images",
            text="10 devices with 100 random images of Fashion-MNIST each, about 10 of each class.",
            shift="none",
            domains=(FASHION,),
            clients=_alike(10, 100),
        ),
        "alike-many": Scenario(
            title="Like devices, many images",
            text="3 devices with 1,000 random images of Fashion-MNIST each, about 100 of each class.",
            shift="none",
            domains=(FASHION,),
            clients=_alike(3, 1000),
        ),
        "label-few": Scenario(
            title="Different classes, few images",
            text="10 devices share 100 images of each class of Fashion-MNIST in shares drawn from a Dirichlet "
            "distribution (0.1): 12 to 271 images of one to seven classes.",
            shift="label",
            domains=(FASHION,),
            clients=_by_label(10),
        ),
        "label-many": Scenario(
            title="Different classes, many images",
            text="The same with 200 images of each class: up to 199 images of a class on a device.",
            shift="label",
            domains=(FASHION,),
            clients=_by_label(20),
        ),
        "domain-few": Scenario(
            title="A domain for each device, few images",
            text="One device each on MNIST, USPS, MNIST-M and scikit-learn's digits, with 10 images of each class.",
            shift="feature",
            domains=DIGITS,
            clients=_by_domain(10),
        ),
        "domain-many": Scenario(
            title="A domain for each device, many images",
            text="The same with 40 images of each class.",
            shift="feature",
            domains=DIGITS,
            clients=_by_domain(40),
        ),
        "domains": Scenario(
            title="Several devices in each domain",
            text="20 devices on the same four domains, 3 with 40 images, 7 with 20, 6 with 80 and 4 with 20 "
            "(`python -m research fpl --data digits`).",
            shift="feature",
            domains=DIGITS,
            clients=lambda domains, seed: planned("digits", domains, seed=seed, validation=False),
        ),
    }
)


BACKBONE, IMAGE_SIZE = "mobilenetv2_100", 96
IMAGES = 2000
"""Of each part of a data set of digits, at most."""

TEST_IMAGES = 2000
"""Of each domain, at most; all domains of a fleet have the same number."""

ALGORITHMS = tuple(dict.fromkeys(name.partition(",")[0] for name in NAMES))

COLUMNS = {
    "algorithm": "<30", "uploads": ">9", "kB up": ">10", "kB down": ">10", "all test images": ">17",
    "own share": ">13", "with the prior": ">16", "time": ">7", "seeds": ">9", "commit": ">10",
}  # fmt: skip


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
    """The same with the class prior of the client's images; empty if not measured."""
    uploads: int
    up_bytes: float
    down_bytes: float
    seconds: float
    commit: str = ""
    """Of the code that ran."""


@click.command("which")
@repeated("--scenario", "names", type=click.Choice(list(SCENARIOS)), default=tuple(SCENARIOS))
@repeated("--algorithm", "algorithms", type=click.Choice(ALGORITHMS), default=ALGORITHMS)
@click.option("--layers", metavar="LAYER,...", default="", help="Blocks of the backbone.  [default: last]")
@repeated("--seed", "seeds", type=int, default=(0, 1, 2), help="Of the devices' images; may be repeated.")
@resume_option
@json_option
def command(
    *,
    names: tuple[str, ...],
    algorithms: tuple[str, ...],
    layers: str,
    seeds: tuple[int, ...],
    resume: Path | None,
    json_file: Path | None,
) -> None:
    """Compare all algorithms, with their defaults, on fleets that differ in different ways."""
    stored = json.loads(resume.read_text(encoding="utf-8")) if resume else {"layers": layers, "runs": []}
    if stored.get("layers", "") != layers:
        raise click.UsageError(f"{resume} has other layers: give the same --layers")
    runs = {_key(run): run for run in msgspec.convert(stored["runs"], list[Run])}
    rows = [row for row in NAMES if row.partition(",")[0] in algorithms]

    def store(tables: Sequence[Table] = ()) -> None:
        every = [asdict(run) for run in runs.values()]
        write_json(json_file, "which", tables=tables, backbone=BACKBONE, layers=layers, runs=every)

    for seed in seeds:
        for name in names:
            missing = [row for row in rows if (name, row, seed) not in runs]
            for run in _runs(name, seed, missing, layers) if missing else ():
                runs[_key(run)] = run
                click.echo(f"{name}, seed {seed}, {run.algorithm}: {np.mean(run.everywhere):.1%}", err=True)
                store()
    store(tables_of(runs.values()))


def _key(run: Run) -> tuple[str, str, int]:
    return run.scenario, run.algorithm, run.seed


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
    few = {}
    for name, domain in domains.items():
        rows = np.random.default_rng(0).permutation(len(domain.test))[:number]
        few[name] = replace(domain, test=domain.test[rows], test_labels=domain.test_labels[rows])
    return few


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


def tables_of(runs: Collection[Run]) -> list[Table]:
    """Print a table for each scenario: means over the seeds of an algorithm."""
    tables = []
    for name, scenario in SCENARIOS.items():
        mine = sorted((run for run in runs if run.scenario == name), key=lambda run: run.seed)
        if not mine:
            continue
        table = Table(COLUMNS, title=f"{scenario.title}. {scenario.text.removesuffix('.')}")
        units = {run.seed: run.seconds for run in mine if run.algorithm == FEDTC}
        for algorithm in NAMES:
            if each := [run for run in mine if run.algorithm == algorithm]:
                table.row(algorithm, *_cells(each, shift=scenario.shift, units=units))
        tables.append(table)
    return tables


def _cells(runs: Sequence[Run], *, shift: str, units: Mapping[int, float]) -> Iterator[str | None]:
    """Yield a row's cells after the name; accuracies that are the same by design are left out.

    `units` are FedTC's seconds by seed; a row without FedTC's of all its seeds has no time.
    """
    if runs[0].uploads:
        yield " or ".join(map(str, sorted({run.uploads for run in runs})))
        for size in ("up_bytes", "down_bytes"):
            yield f"{np.mean([getattr(run, size) for run in runs]) / 1e3:,.0f}"
    else:
        yield from (None,) * 3
    for name, is_shown in (
        ("everywhere", True),
        ("own", shift != "none"),
        ("own_with_prior", shift == "label"),
    ):
        means = [100 * np.mean(getattr(run, name)) for run in runs if is_shown and getattr(run, name)]
        deviation = f" ± {np.std(means):.1f}" if len(means) > 1 else ""
        yield f"{np.mean(means):.1f}{deviation}" if means else None
    seeds = [run.seed for run in runs]
    has_time = units.keys() >= set(seeds)
    yield f"{sum(run.seconds for run in runs) / sum(map(units.__getitem__, seeds)):.1f}" if has_time else None
    yield ", ".join(map(str, seeds))
    yield ", ".join(dict.fromkeys(run.commit for run in runs))
