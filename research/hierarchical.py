"""`python -m research hierarchical`: variants of hierarchical Gaussian prototypes, in plain numpy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.clustering import NO_GROUP, group_devices, partitions
from benchmarks.data.domains import LABEL_DOMAIN, PLANS, SHIFTS, load_domains, planned, shifted
from benchmarks.data.images import DIGITS, PACS, PAIRED
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from protofleet.simulation.fleet import Client
from research.rounds.fedpcl import BACKBONES, IMAGE_SIZE

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One choice of each parameter."""

    directions: int = 16
    passes: int | None = None
    """Orthogonal iterations; None for exact eigenvectors."""
    share: float = 0.5
    """Share of the scatter in the covariance; the rest is a multiple of the identity."""
    spread: bool = True
    """Spread the variance outside the directions over all of them."""
    tau: float = 10.0
    kappa: float | None = None
    """Images for which the fleet's mean counts; None estimates them."""
    groups: Literal["predictive", "none", "first", "domains"] = "predictive"
    """Those that predict devices' means, none, FINCH's first partition, or the domains, which no aggregator knows."""
    group_kappa: float | None = None
    """Images for which a group's mean counts; None estimates them."""
    prior: bool = True
    """Not on the fleets of `fpl`, whose devices are all evaluated on the same images."""


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "exact eigenvectors": Variant(),
        **{f"{number} passes": Variant(passes=number) for number in (1, 2, 3, 5)},
        **{f"{number} directions": Variant(directions=number) for number in (8, 32)},
        **{f"tau {tau}": Variant(tau=tau) for tau in (5, 20)},
        **{f"{share} of the scatter": Variant(share=share) for share in (0.3, 0.7)},
        **{f"kappa {kappa}": Variant(kappa=kappa) for kappa in (3, 10)},
        "not spread": Variant(spread=False),
        "without prior": Variant(prior=False),
        "no groups": Variant(groups="none"),
        "first partition": Variant(groups="first"),
        "domains known": Variant(groups="domains"),
        **{f"group kappa {kappa}": Variant(group_kappa=kappa) for kappa in (10, 30)},
    }
)


@dataclass(frozen=True)
class Upload:
    """A device's class means (C, L) and counts (C,), directions (r, L) of its scatter, and the scatter's trace."""

    means: Floats
    counts: Floats
    factor: Floats
    trace: float


@click.command("hierarchical")
@repeated(
    "--shift",
    "shifts",
    type=click.Choice([*SHIFTS, *PLANS]),
    default=(*SHIFTS, *PLANS),
    help="As of `fedpcl`, or the data of `fpl`; may be repeated.",
)
@click.option("--backbones", type=click.IntRange(1, len(BACKBONES)), default=1, show_default=True)
@repeated(
    "--variant", "names", type=click.Choice(list(VARIANTS)), default=tuple(VARIANTS), help="May be repeated."
)
@repeated("--seed", "seeds", type=int, default=(0, 1, 2), help="May be repeated.")
@click.option(
    "--images", type=click.IntRange(1, PAIRED), default=2000, help="Of each part of a data set, at most."
)
@click.option(
    "--test", is_flag=True, help="Evaluate on test images instead of training images that no device has."
)
@json_option
def command(
    *,
    shifts: Sequence[str],
    backbones: int,
    names: Sequence[str],
    seeds: Sequence[int],
    images: int,
    test: bool,
    json_file: Path | None,
) -> None:
    """Measure what choices in hierarchical Gaussian prototypes are worth, in the settings of `fedpcl` and `fpl`."""
    fleets = {shift: _fleets(shift, backbones, seeds, images=images, test=test) for shift in shifts}
    columns = [name for shift in shifts for name in (shift, *([f"{shift} worst"] if shift in PLANS else []))]
    table = Table({"variant": "<24", **dict.fromkeys(columns, ">13.1%")})
    rows = []
    for name in names:
        variant = VARIANTS[name]
        figures: dict[str, float] = {}
        for shift in shifts:
            used = replace(variant, prior=False) if shift in PLANS else variant
            found = np.array([accuracy(clients, used) for clients in fleets[shift]])
            figures |= dict(zip((shift, f"{shift} worst"), found.mean(axis=0).tolist(), strict=True))
        table.row(name, *(figures[column] for column in columns))
        rows.append({"variant": name, **asdict(variant), **figures})
    write_json(json_file, "hierarchical", seeds=seeds, backbones=backbones, test=test, rows=rows)


def _fleets(
    shift: str, backbones: int, seeds: Sequence[int], *, images: int, test: bool
) -> list[list[Client]]:
    """Return the fleets of a setting, one for each seed."""
    owners = (LABEL_DOMAIN,) if shift == "label" else PACS if shift == "pacs" else DIGITS
    at_most = None if shift == "pacs" else images
    domains = load_domains(owners, BACKBONES[:backbones], image_size=IMAGE_SIZE, at_most=at_most)
    if shift in PLANS:
        return [planned(shift, domains, seed=seed, validation=not test) for seed in seeds]
    return [
        shifted(domains, shift, per_class=10, clients=10, concentration=1.0, seed=seed, validation=not test)
        for seed in seeds
    ]


def accuracy(clients: Sequence[Client], variant: Variant) -> tuple[float, float]:
    """Return the mean over domains of their clients' mean accuracy, each on its own mixture, and the worst domain's."""
    classes = 1 + max(int(client.train_labels.max()) for client in clients)
    uploads = [_upload(client, variant, classes=classes) for client in clients]
    freedom = sum(float(np.maximum(each.counts - 1, 0).sum()) for each in uploads)
    whiten = _whitening(uploads, variant, freedom=freedom)
    counts = np.array([each.counts for each in uploads])
    variance = sum(each.trace for each in uploads) / freedom
    domains = np.array([client.domain for client in clients])
    means = _drawn(np.array([each.means for each in uploads]), counts, variance, variant, domains=domains)
    correct = []
    for client, count, mean in zip(clients, counts, means, strict=True):
        features, centers = whiten(client.test), whiten(mean)
        logits = (features @ centers.T - (centers * centers).sum(axis=1) / 2) / variant.tau
        if variant.prior:
            logits = logits + np.log(count + count.sum() / (10 * classes))
        correct.append(client.accuracy(logits.argmax(axis=1)))
    of_domains = [float(np.array(correct)[domains == name].mean()) for name in np.unique(domains)]
    return float(np.mean(of_domains)), min(of_domains)


def _drawn(
    own: Floats, counts: Floats, variance: float, variant: Variant, *, domains: NDArray[np.str_]
) -> Floats:
    """Return the devices' class means (K, C, L), drawn to those of their groups or of the fleet."""
    fleet = _means(own, counts, np.zeros(len(own), np.int64))[0]
    offsets = np.where(counts[..., None] > 0, own - fleet, 0)
    kappa = variant.kappa or _kappa(offsets, counts, variance, np.zeros(len(own), np.int64))
    groups = _groups(offsets, counts, domains, how=variant.groups)
    sets = np.where(groups >= 0, groups, groups.max() + 1 + np.arange(len(own)))
    common, images = np.zeros_like(own), np.full(len(own), kappa)
    if (groups >= 0).any():
        of_sets = _means(offsets, counts, sets)
        totals = np.stack([counts[sets == each].sum(axis=0) for each in range(sets.max() + 1)])
        between = _kappa(of_sets, totals, variance, np.zeros(len(of_sets), np.int64))
        grouped = groups >= 0
        away = np.where(counts[..., None] > 0, offsets - of_sets[sets], 0)[grouped]
        within = variant.group_kappa or _kappa(away, counts[grouped], variance, groups[grouped])
        drawn = of_sets * (totals / (totals + between))[..., None]
        common[grouped], images[grouped] = drawn[groups[grouped]], within
    weighted = counts[..., None] * own + images[:, None, None] * (fleet + common)
    return np.asarray(weighted / (counts + images[:, None])[..., None])


def _groups(offsets: Floats, counts: Floats, domains: NDArray[np.str_], *, how: str) -> NDArray[np.int64]:
    """Return the group of each device, or NO_GROUP."""
    if how == "predictive":
        devices, labels = np.nonzero(counts)
        return group_devices(
            offsets[devices, labels], labels, counts[devices, labels].astype(np.int64), devices
        )
    if how == "first":
        return partitions(np.einsum("kc,kcl->kl", counts, offsets) / counts.sum(axis=1)[:, None])[0]
    if how == "domains":
        return np.unique(domains, return_inverse=True)[1]
    return np.full(len(offsets), NO_GROUP)


def _means(values: Floats, counts: Floats, sets: NDArray[np.int64]) -> Floats:
    """Return the class means of sets of devices, (sets, C, L)."""
    found = []
    for each in range(sets.max() + 1):
        own = sets == each
        sums = np.einsum("kc,kcl->cl", counts[own], values[own])
        found.append(sums / np.maximum(counts[own].sum(axis=0), 1)[:, None])
    return np.stack(found)


def _upload(client: Client, variant: Variant, *, classes: int) -> Upload:
    features = client.train.astype(np.float64)
    members = np.eye(classes)[client.train_labels]
    counts = members.sum(axis=0)
    means = members.T @ features / np.maximum(counts, 1)[:, None]
    away = features - means[client.train_labels]
    if variant.passes is None:
        _, lengths, rows = np.linalg.svd(away, full_matrices=False)
        factor = lengths[: variant.directions, None] * rows[: variant.directions]
    else:
        factor = np.random.default_rng(0).normal(size=(variant.directions, features.shape[1]))
        for _ in range(variant.passes):
            scatter = (away @ np.linalg.qr(factor.T)[0]).T @ away
            factor = scatter / np.sqrt(np.linalg.norm(scatter, axis=1, keepdims=True))
    return Upload(means, counts, factor, float((away * away).sum()))


def _whitening(
    uploads: Sequence[Upload], variant: Variant, *, freedom: float
) -> Callable[[NDArray[np.floating]], Floats]:
    """Return the product with the inverse root of share S + (1 - share) tr(S) / L I, with S of all devices."""
    factors = np.concatenate([each.factor for each in uploads]) / np.sqrt(freedom)
    whole = sum(each.trace for each in uploads) / freedom
    _, lengths, rows = np.linalg.svd(factors, full_matrices=False)
    along = float((lengths * lengths).sum())
    rest = variant.share * (whole - along) if variant.spread else 0.0
    floor = ((1 - variant.share) * whole + rest) / factors.shape[1]
    change = 1 / np.sqrt(floor + variant.share * lengths**2) - 1 / np.sqrt(floor)
    return lambda values: values / np.sqrt(floor) + (values @ rows.T * change) @ rows


def _kappa(offsets: Floats, counts: Floats, variance: float, sets: NDArray[np.int64]) -> float:
    """Return the variance within classes over that of devices' means in their sets, by the method of moments."""
    squares, spread = float((counts * (offsets * offsets).sum(axis=2)).sum()), 0.0
    for each in np.unique(sets):
        own = counts[sets == each]
        totals = np.maximum(own.sum(axis=0), 1)
        squares -= float(((own > 0).sum(axis=0) - 1).clip(0).sum()) * variance
        spread += float((own.sum(axis=0) - (own * own).sum(axis=0) / totals).sum())
    return variance / max(squares / max(spread, 1.0), 1e-6 * variance)
