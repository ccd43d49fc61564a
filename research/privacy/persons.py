"""`python -m research persons`: privacy of people with several images: membership, and what their noise costs."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.statistics.noisy_ridge import NoisyTotal, Shortening, of_features, solve_noisy
from aggregator.graphs.head_export import mapped
from benchmarks.data.features import load_features
from benchmarks.data.images import NAMES
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from edge_client.privacy.sum_mechanism import NoisySums, noisy_sums
from protocol.errors import ProtofleetError
from protocol.statistics.gaussian_privacy import noise_multiplier
from protocol.statistics.integer_rows import MAX_VALUE
from protocol.statistics.noisy_sums import COUNT_WEIGHT, UNITS, deviations, epsilon_of_sums
from protocol.statistics.public_map import PublicMap
from protocol.statistics.second_moment import to_triangle
from protocol.wire.codec import digest_of
from protofleet.simulation.fleet import Features
from research.privacy.noisy_sums import BACKBONE, SIZE, accuracy_of_sums, drawn, map_of_photographs
from research.privacy.private_fleet import DELTA

MEMBER_IMAGES = (1, 2, 5, 10)
LARGEST = 10
"""Images of each person in the comparison of noises, and of the largest in the attack."""

CLIPS = (1.0, 2.0, 3.0, 5.0, 7.0)
"""Lengths that a person's sum is shortened to, in those of one image; the best on test images is shown."""

POWER_STEPS = 8
"""Towards the first principal component."""

UNIT_LENGTH = float(np.sqrt(2 + COUNT_WEIGHT**2))
"""Length of what the longest image changes: a count of `COUNT_WEIGHT`, a sum of 1 and products of 1."""

COLUMNS = {"data": "<14", "images": ">8,", "devices": ">8", "k": ">4", "no noise": ">9.1%"}
CLIP_COLUMNS = {
    "data": "<14", "persons": "<22", "length": ">8.2f", "k = 1": ">8.1%", "k = 10": ">8.1%",
    "clipped sum": ">12.1%", "at": ">5g",
}  # fmt: skip
AUC_COLUMNS = {"images": "<14", "unit": "<8", "epsilon": ">8g"}


@dataclass(frozen=True, kw_only=True)
class Persons:
    """Rows of persons, of whom each has several.

    Attributes:
        rows: integers (n, D).
        labels: (n,).
        person: number of each row's person, (n,).
    """

    rows: NDArray[np.int8]
    labels: NDArray[np.int64]
    person: NDArray[np.int64]


def alike(rows: NDArray[np.int8], each: int) -> Iterator[NDArray[np.intp]]:
    """Yield groups of `each` rows that resemble one another: halves along about the first principal component."""
    stack = [np.arange(len(rows))]
    while stack:
        members = stack.pop()
        if len(members) < 2 * each:
            yield members[:each]
            continue
        part = rows[members].astype(np.float32)
        part -= part.mean(axis=0)
        axis = part[0] + 1
        for _ in range(POWER_STEPS):
            axis = part.T @ (part @ axis)
            axis /= np.linalg.norm(axis) + 1e-9
        along = part @ axis
        middle = (len(members) // 2 + each - 1) // each * each
        order = members[np.argsort(along)]
        stack += [order[:middle], order[middle:]]


def persons_of(
    rows: NDArray[np.int8], labels: NDArray[np.int64], *, kind: str, classes: int, seed: int
) -> Persons:
    """Return persons of LARGEST images: alike or any of one class, or of all classes."""
    random = np.random.default_rng(seed)
    groups: list[NDArray[np.intp]] = []
    if kind == "any class":
        order = random.permutation(len(rows))
        groups = list(order[: len(order) // LARGEST * LARGEST].reshape(-1, LARGEST))
    else:
        for label in range(classes):
            members = random.permutation(np.flatnonzero(labels == label))
            if kind == "one class":
                groups += list(members[: len(members) // LARGEST * LARGEST].reshape(-1, LARGEST))
            else:
                groups += [members[group] for group in alike(rows[members], LARGEST)]
    chosen = np.concatenate(groups)
    person = np.repeat(np.arange(len(groups)), list(map(len, groups)))
    return Persons(rows=rows[chosen], labels=labels[chosen], person=person)


def lengths(persons: Persons) -> NDArray[np.float64]:
    """Return the length of what each person changes, in that of the longest image."""
    found = []
    ends = np.flatnonzero(np.diff(persons.person)) + 1
    for own in np.split(np.arange(len(persons.rows)), ends):
        rows, labels = persons.rows[own].astype(np.float64) / MAX_VALUE, persons.labels[own]
        products, same = rows @ rows.T, labels[:, None] == labels
        square = COUNT_WEIGHT**2 * same.sum() + products[same].sum() + np.square(products).sum()
        found.append(float(np.sqrt(square)) / UNIT_LENGTH)
    return np.array(found)


def exact_sums(
    rows: NDArray[np.int8], labels: NDArray[np.int64], weights: NDArray[np.float64], *, classes: int
) -> NoisySums:
    """Return sums without noise in which each row (n, D) has a weight (n,)."""
    whole = rows.astype(np.float64)
    in_class = (labels[:, None] == np.arange(classes)) * weights[:, None]
    products = np.trunc((whole * weights[:, None]).T @ whole).astype(np.int64)
    return NoisySums(
        counts=np.trunc(UNITS * in_class.sum(axis=0)).astype(np.int64),
        sums=np.trunc(UNITS * in_class.T @ whole).astype(np.int64),
        second_moment=to_triangle(products),
    )


def accuracy(data: Features, how: PublicMap, exact: NoisySums, *, z: float, key: bytes) -> float:
    """Return the accuracy of a head of exact sums and noise of the multiplier z, for one row."""
    none = np.zeros((0, exact.sums.shape[1]), np.int8)
    noise = noisy_sums(none, np.zeros(0, np.int64), classes=data.classes, noise_multiplier=z, key=key)
    total = {name: value + getattr(exact, name) for name, value in vars(noise).items()}
    try:
        layer, _ = solve_noisy(NoisyTotal(**total, noise_multiplier=z))
    except ProtofleetError:  # the noise is as large as the sums
        return 1 / data.classes
    logits = of_features(layer, how).outputs(mapped(Shortening(how), data.test))
    return float((logits.argmax(axis=1) == data.test_labels).mean())


def compare_noises(
    data: Features, how: PublicMap, rows: NDArray[np.int8], *, kind: str, epsilon: float, seed: int
) -> dict[str, Any]:
    """Return accuracies of the same persons: one image of each, all with noise of as many, and a clipped sum."""
    persons = persons_of(rows, data.train_labels, kind=kind, classes=data.classes, seed=seed)
    length = lengths(persons)
    first = np.flatnonzero(np.diff(persons.person, prepend=-1))
    z, key = noise_multiplier(epsilon, DELTA, cost=epsilon_of_sums), digest_of(f"{kind} {seed}".encode())
    classes, rows, labels = data.classes, persons.rows, persons.labels

    def measured(weights: NDArray[np.float64], noise: float) -> float:
        exact = exact_sums(rows, labels, weights, classes=classes)
        return accuracy(data, how, exact, z=noise * z, key=key)

    is_first = np.isin(np.arange(len(rows)), first).astype(np.float64)
    return {
        "length": float(length.mean()),
        "k = 1": measured(is_first, 1),
        "k = 10": measured(np.ones(len(rows)), LARGEST),
        "clipped": {clip: measured(np.minimum(1, clip / length)[persons.person], clip) for clip in CLIPS},
    }


def membership_auc(
    member: NDArray[np.number[Any]], *, rows: int, epsilon: float, releases: int, seed: int
) -> dict[int, float]:
    """Return the AUC of a test for a person, by how many of the person's images (n, D) are in the sums.

    The attacker knows the images and everything else, and tests by the likelihood ratio, which no test exceeds. The
    noise is that of `rows` images. Rows are turned into the space that they span, as many values as there are images:
    the noise is the same in all directions, and the others do not change.
    """
    from sklearn.metrics import roc_auc_score

    member = np.rint(member.astype(np.float64) @ np.linalg.qr(member.T.astype(np.float64))[0])

    z = noise_multiplier(epsilon, DELTA, cost=epsilon_of_sums, rows=rows)
    kinds, size = deviations(z), member.shape[1]
    at = np.triu_indices(size)
    products = np.where(at[0] == at[1], kinds["squares"], kinds["products"])
    scale = np.concatenate([[kinds["counts"]], np.full(size, kinds["sums"]), products])
    changes = {}
    for images in MEMBER_IMAGES:
        part = member[: images if rows == 1 else min(images, rows)].astype(np.float64)
        change = [[UNITS * len(part)], UNITS * part.sum(axis=0), (part.T @ part)[at]]
        changes[images] = np.concatenate(change) / scale
    scores: dict[int, list[float]] = {images: [] for images in MEMBER_IMAGES}
    for number in range(2 * releases):
        key = digest_of(f"{seed} {rows} {epsilon} {number}".encode())
        none = np.zeros((0, size), np.int8)
        made = noisy_sums(none, np.zeros(0, np.int64), classes=1, noise_multiplier=z, key=key)
        noise = np.concatenate([made.counts, made.sums.ravel(), made.second_moment]) / scale
        for images, change in changes.items():
            # Sums of the images and of noise are the noisy sums of the images.
            scores[images].append(float((noise + change * (number % 2)) @ change))
    is_member = np.arange(2 * releases) % 2
    return {images: float(roc_auc_score(is_member, found)) for images, found in scores.items()}


@click.command("persons")
@repeated("--data", "names", type=click.Choice(NAMES), default=("fashion_mnist", "cifar10", "mnist"))
@repeated(
    "--images", "sizes", type=int, default=(6000, 60_000), help="Of all devices, at most those there are."
)
@repeated(
    "--devices", type=float, default=(1, 10, 100), help="That add noise; 1 is noise for the fleet at once."
)
@repeated("--epsilon", "epsilons", type=float, default=(1.0, 2.0, 4.0, 8.0))
@repeated(
    "--images-per-person", "counts", type=int, default=(1, 3, 10), help="k, whose noise is that of k images."
)
@repeated("--seed", "seeds", type=int, default=(0, 1, 2))
@click.option("--size", type=int, default=371, show_default=True, help="D, the length of a row.")
@click.option("--releases", type=int, default=1000, show_default=True, help="With a person, and without.")
@click.option("--at-most", type=int, help="Images of each part of a data set, for a trial.")
@json_option
def command(
    *, names: tuple[str, ...], sizes: tuple[int, ...], devices: tuple[float, ...], epsilons: tuple[float, ...],
    counts: tuple[int, ...], seeds: tuple[int, ...], size: int, releases: int, at_most: int | None,
    json_file: Path | None,
) -> None:  # fmt: skip
    """Measure membership of persons with several images, and what it costs to protect them."""
    how, runs = map_of_photographs(size, at_most=at_most), list[dict[str, Any]]()
    title = f"{BACKBONE}, {size} values, delta {DELTA:g}"
    accuracies = Table(
        {**COLUMNS, **{f"{each:g}": ">8.1%" for each in epsilons}}, title=f"{title}, {len(seeds)} seeds"
    )
    noises = Table(
        CLIP_COLUMNS, title=f"persons of {LARGEST} images, noise once, epsilon 1, {len(seeds)} seeds"
    )
    aucs = Table(
        {**AUC_COLUMNS, **{f"{each}": ">8.1%" for each in MEMBER_IMAGES}},
        title=f"AUC by a person's images, {releases} releases each",
    )
    for name in names:
        data = load_features(name, backbone=BACKBONE, image_size=SIZE, at_most=at_most)
        rows = how.rows(data.train)
        _membership(aucs, runs, name, rows, data.train_labels, releases)
        for kind in ("alike, one class", "one class", "any class"):
            _noises(noises, runs, name, data, how, rows, kind=kind, seeds=seeds)
        for images in (min(each, len(rows)) for each in sizes):
            _accuracies(
                accuracies, runs, name, data, how, rows,
                images=images, devices=devices, epsilons=epsilons, counts=counts, seeds=seeds,
            )  # fmt: skip
    write_json(json_file, "persons", tables=[aucs, accuracies, noises], plots=[], runs=runs)


def _membership(
    table: Table,
    runs: list[dict[str, Any]],
    name: str,
    rows: NDArray[np.int8],
    labels: NDArray[np.int64],
    releases: int,
) -> None:
    """Add the AUC for a person whose images are alike, and for one whose images are the longest, and equal."""
    members = np.flatnonzero(labels == 0)
    group = max(
        alike(rows[members], LARGEST), key=lambda each: int(np.square(rows[members][each].astype(int)).sum())
    )
    real = rows[members][group]
    longest = np.zeros((LARGEST, LARGEST), np.int8)
    longest[:, 0] = MAX_VALUE
    for what, person in ((name, real), ("equal, longest", longest)):
        for most in (1, LARGEST):
            for epsilon in (1.0, 4.0):
                found = membership_auc(person, rows=most, epsilon=epsilon, releases=releases, seed=0)
                table.row(what, "image" if most == 1 else f"person, {most}", epsilon, *found.values())
                runs.append({"images": what, "k": most, "epsilon": epsilon, "auc": found})


def _noises(
    table: Table, runs: list[dict[str, Any]], name: str, data: Features, how: PublicMap, rows: NDArray[np.int8],
    *, kind: str, seeds: Sequence[int],
) -> None:  # fmt: skip
    found = [compare_noises(data, how, rows, kind=kind, epsilon=1.0, seed=seed) for seed in seeds]
    mean = {each: float(np.mean([one[each] for one in found])) for each in ("length", "k = 1", "k = 10")}
    by_clip = {clip: float(np.mean([one["clipped"][clip] for one in found])) for clip in CLIPS}
    best = max(by_clip, key=lambda clip: by_clip[clip])
    table.row(name, kind, *mean.values(), by_clip[best], best)
    runs.append({"data": name, "persons": kind, **mean, "clipped": by_clip})


def _accuracies(
    table: Table, runs: list[dict[str, Any]], name: str, data: Features, how: PublicMap, rows: NDArray[np.int8], *,
    images: int, devices: Sequence[float], epsilons: Sequence[float], counts: Sequence[int], seeds: Sequence[int],
) -> None:  # fmt: skip
    exact = []
    for seed in seeds:
        chosen = drawn(data, images, seed)
        weights = np.ones(len(chosen))
        exact.append(exact_sums(rows[chosen], data.train_labels[chosen], weights, classes=data.classes))
    without = [
        accuracy_of_sums(data, how, rows, images=images, devices=1, epsilon=None, seed=seed) for seed in seeds
    ]
    for fleet, count in itertools.product(devices, counts):
        values = []
        for epsilon in epsilons:
            z = noise_multiplier(epsilon, DELTA, cost=epsilon_of_sums, rows=count) * math.sqrt(fleet)
            keys = [digest_of(f"{seed} {images} {fleet:g} {epsilon} {count}".encode()) for seed in seeds]
            found = [accuracy(data, how, each, z=z, key=key) for each, key in zip(exact, keys, strict=True)]
            options = {"images": images, "devices": fleet, "epsilon": epsilon, "k": count}
            runs.append({"data": name, **options, "sums": found})
            values.append(float(np.mean(found)))
        table.row(name, images, f"{fleet:g}", count, float(np.mean(without)), *values)
