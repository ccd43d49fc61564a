"""`python -m benchmarks which`: every algorithm with its defaults on the same fleets, for docs/which-algorithm.md."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

import click
import numpy as np

from benchmarks.accuracy import fpl
from benchmarks.accuracy.which.methods import FEDTC, Logits, Trained, train_all
from benchmarks.data.domains import Client, feature_shift, load_domains, shifted, unequal
from benchmarks.data.features import Features
from benchmarks.data.images import DIGITS
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json

BACKBONE = "mobilenetv2_100"
FASHION = "fashion_mnist"
TEST_IMAGES = 2000
"""Of each domain, at most; all domains of a fleet have the same number."""

BEGIN, END = "<!-- python -m benchmarks which: begin -->", "<!-- python -m benchmarks which: end -->"
"""Lines of a page between which `--markdown` writes."""

COLUMNS = {
    "scenario": "<14", "algorithm": "<30", "seed": ">6", "uploads": ">9", "kB up": ">10,.0f", "kB down": ">10,.0f",
    "all": ">8.1%", "own": ">8.1%", "prior": ">8.1%", "seconds": ">9.1f",
}  # fmt: skip
HEADINGS = "| algorithm | uploads | kB up | kB down | all test images | own share | with the prior | time |"

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
            "(`python -m benchmarks fpl --data digits`).",
            shift="feature",
            domains=DIGITS,
            clients=lambda domains, seed: fpl.fleet("digits", domains, seed=seed, validation=False),
        ),
    }
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


@click.command("which")
@repeated(
    "--scenario",
    "names",
    type=click.Choice(list(SCENARIOS)),
    default=tuple(SCENARIOS),
    help="May be repeated.",
)
@repeated("--seed", "seeds", type=int, default=(0, 1, 2), help="Of the devices' images; may be repeated.")
@click.option(
    "--markdown",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Write the tables into this page, docs/which-algorithm.md for instance; those of other scenarios stay.",
)
@json_option
def command(
    *, names: tuple[str, ...], seeds: tuple[int, ...], markdown: Path | None, json_file: Path | None
) -> None:
    """Compare all algorithms, with their defaults, on fleets that differ in different ways."""
    table = Table(COLUMNS)
    runs: list[Run] = []
    for seed in seeds:
        for name in names:
            for run in _runs(name, seed):
                runs.append(run)
                table.row(*_cells([run], seed))
    for each in _groups(runs).values():
        table.row(*_cells(each, "mean"))
    write_json(json_file, "which", backbone=BACKBONE, runs=[asdict(run) for run in runs])
    if markdown:
        write_tables(markdown, runs)


def _runs(name: str, seed: int) -> Iterator[Run]:
    scenario = SCENARIOS[name]
    domains = load_domains(
        scenario.domains,
        (BACKBONE,),
        image_size=fpl.IMAGE_SIZE,
        at_most=None if scenario.domains == (FASHION,) else fpl.IMAGES,
    )
    classes = next(iter(domains.values())).classes
    clients = judged_by_all(scenario.clients(_with_fewer_tests(domains), seed))
    for algorithm, trained in train_all(clients, classes=classes, prior=scenario.shift == "label"):
        yield _run(name, algorithm, seed, clients, trained)


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
    )


def _groups(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """Return the runs of each scenario and algorithm, in the order of first appearance."""
    groups = {(run.scenario, run.algorithm): list[Run]() for run in runs}
    for run in runs:
        groups[run.scenario, run.algorithm].append(run)
    return groups


def _mean(runs: Sequence[Run], name: str) -> float:
    return float(np.mean([np.mean(getattr(run, name)) for run in runs]))


def _cells(runs: Sequence[Run], seed: int | str) -> tuple[object, ...]:
    """Return a row on stdout: means over the seeds."""
    first = runs[0]
    return (
        *(first.scenario, first.algorithm, seed, _uploads(runs)),
        *(_mean(runs, "up_bytes") / 1e3, _mean(runs, "down_bytes") / 1e3),
        *(_mean(runs, "everywhere"), _mean(runs, "own")),
        _mean(runs, "own_with_prior") if first.own_with_prior else None,
        _mean(runs, "seconds"),
    )


def _uploads(runs: Sequence[Run]) -> str:
    return " or ".join(map(str, sorted({run.uploads for run in runs})))


def write_tables(page: Path, runs: Sequence[Run]) -> None:
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
    scenario, groups = SCENARIOS[name], _groups(runs)
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    yield f"{scenario.title}\n\n{scenario.text} Seeds: {seeds}.\n"
    yield f"{HEADINGS}\n|{'---|' * HEADINGS.count(' | ')}---|"
    unit = _mean(groups[name, FEDTC], "seconds")
    for (_, algorithm), each in groups.items():
        yield _line(algorithm, each, shift=scenario.shift, unit=unit)


def _line(algorithm: str, runs: Sequence[Run], *, shift: str, unit: float) -> str:
    """Return a row of a page; one accuracy where all are the same by design."""
    traffic: tuple[str, ...] = ("", "", "")
    if runs[0].uploads:
        traffic = _uploads(runs), *(f"{_mean(runs, name) / 1e3:,.0f}" for name in ("up_bytes", "down_bytes"))
    shown = {"everywhere": True, "own": shift != "none", "own_with_prior": shift == "label"}
    accuracies = [_accuracy(runs, name) if show else "" for name, show in shown.items()]
    cells = (algorithm, *traffic, *accuracies, f"{_mean(runs, 'seconds') / unit:.1f}")
    return f"| {' | '.join(cells)} |"


def _accuracy(runs: Sequence[Run], name: str) -> str:
    """Return the mean over devices and seeds in percent, and the standard deviation over several seeds."""
    means = [100 * np.mean(getattr(run, name)) for run in runs if getattr(run, name)]
    if not means:
        return ""
    return f"{np.mean(means):.1f}" + (f" ± {np.std(means):.1f}" if len(means) > 1 else "")
