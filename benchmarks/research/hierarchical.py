"""`python -m benchmarks research hierarchical`: variants of hierarchical Gaussian prototypes, in plain numpy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.comparison import repeated
from benchmarks.accuracy.fedpcl import BACKBONES, IMAGE_SIZE
from benchmarks.data.domains import LABEL_DOMAIN, SHIFTS, Client, load_domains, shifted
from benchmarks.data.images import DIGITS, PAIRED
from benchmarks.report import Table, json_option, write_json

Floats = NDArray[np.float64]

CLASSES = 10


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
    prior: bool = True


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
    "--shift", "shifts", type=click.Choice(SHIFTS), default=SHIFTS, help="As of `fedpcl`; may be repeated."
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
    """Measure what choices in hierarchical Gaussian prototypes are worth, in the settings of `fedpcl`."""
    fleets = {}
    for shift in shifts:
        owners = (LABEL_DOMAIN,) if shift == "label" else DIGITS
        domains = load_domains(owners, BACKBONES[:backbones], image_size=IMAGE_SIZE, at_most=images)
        fleets[shift] = [
            shifted(
                domains, shift, per_class=10, clients=10, concentration=1.0, seed=seed, validation=not test
            )
            for seed in seeds
        ]
    table = Table({"variant": "<24", **dict.fromkeys(shifts, ">10.1%")})
    rows = []
    for name in names:
        variant = VARIANTS[name]
        figures = [
            float(np.mean([accuracy(clients, variant) for clients in fleets[shift]])) for shift in shifts
        ]
        table.row(name, *figures)
        rows.append({"variant": name, **asdict(variant), **dict(zip(shifts, figures, strict=True))})
    write_json(json_file, "hierarchical", seeds=seeds, backbones=backbones, test=test, rows=rows)


def accuracy(clients: Sequence[Client], variant: Variant) -> float:
    """Return the mean over the clients of their accuracy on their own mixture of classes."""
    uploads = [_upload(client, variant) for client in clients]
    freedom = sum(float(np.maximum(each.counts - 1, 0).sum()) for each in uploads)
    whiten = _whitening(uploads, variant, freedom=freedom)
    counts = np.array([each.counts for each in uploads])
    own = np.array([each.means for each in uploads])
    fleet = np.einsum("kc,kcl->cl", counts, own) / np.maximum(counts.sum(axis=0), 1)[:, None]
    kappa = variant.kappa or _kappa(own - fleet, counts, sum(each.trace for each in uploads) / freedom)
    means = (counts[..., None] * own + kappa * fleet) / (counts + kappa)[..., None]
    correct = []
    for client, count, mean in zip(clients, counts, means, strict=True):
        features, centers = whiten(client.test), whiten(mean)
        logits = (features @ centers.T - (centers * centers).sum(axis=1) / 2) / variant.tau
        if variant.prior:
            logits = logits + np.log(count + count.sum() / (10 * CLASSES))
        correct.append(client.accuracy(logits.argmax(axis=1)))
    return float(np.mean(correct))


def _upload(client: Client, variant: Variant) -> Upload:
    features = client.train.astype(np.float64)
    members = np.eye(CLASSES)[client.train_labels]
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


def _kappa(offsets: Floats, counts: Floats, variance: float) -> float:
    """Return the variance within classes over that of devices' means, by the method of moments."""
    totals = np.maximum(counts.sum(axis=0), 1)
    freedom = float(((counts > 0).sum(axis=0) - 1).clip(0).sum())
    squares = float((counts * (offsets * offsets).sum(axis=2)).sum())
    spread = float((counts.sum(axis=0) - (counts * counts).sum(axis=0) / totals).sum())
    return variance / max((squares - freedom * variance) / spread, 1e-6 * variance)
