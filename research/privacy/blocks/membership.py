"""Membership of single images in blocks and batches, by a naive attacker and by one that is trained on scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from research.privacy.blocks.uploads import Pool, Upload, draw_rows, upload
from research.privacy.leakage import CANDIDATES, Knowledge, study

FORMS = ("batches", "means", "blocks")
"""Means of five; the class means of a block alone; means, rows and diagonal."""

STRONGEST = (0, 12, 36, 100)
"""Numbers of the strongest public directions behind which likelihood ratios are taken."""

REFERENCES = 150
"""Public images of a class that a score of a candidate is compared with."""

LEAST_DEVICES, MOST_DEVICES = 3, 60
"""Devices that are attacked, at least, and on which the attacker is trained, at most."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Share of the members that score highest among CANDIDATES images of their class."""

    form: str
    images: int
    naive: float
    trained: float
    members: int


def span_shares(vectors: NDArray[np.floating], deviations: NDArray[np.floating]) -> Floats:
    """Return the share of the squares of each deviation (n, L) that lies in the span of vectors (k, L)."""
    _, lengths, axes = np.linalg.svd(np.asarray(vectors, np.float64), full_matrices=False)
    axes = axes[lengths > lengths.max(initial=0) * 1e-5]
    squares: Floats = np.square(deviations @ axes.T).sum(axis=1)
    shares: Floats = squares / np.maximum(np.square(deviations).sum(axis=1), 1e-12)
    return shares


def scores(made: Upload, form: str, label: int, features: NDArray[np.float32], known: Knowledge) -> Floats:
    """Return scores (n, s) of whether images of a class with features (n, L) are in an upload; the first is naive."""
    block, batches = made.block, made.batches
    at = int(np.flatnonzero(block.labels == label)[0])
    deviations = (features - block.means[at]).astype(np.float64)
    along = ((features - known.centers[label]) @ known.axes).astype(np.float64)
    precision = 1 / known.variances.astype(np.float64)
    of_mean = _ratio(
        along, (block.means[at] - known.centers[label]) @ known.axes, block.counts[at], precision
    )
    lengths = (along**2) @ precision
    if form == "means":
        unit = features / np.linalg.norm(features, axis=1, keepdims=True)
        return np.stack([unit @ block.means[at], of_mean, lengths], axis=1)
    if form == "batches":
        mine = batches.labels == label
        of_class = {int(each): mean for each, mean in zip(block.labels, block.means, strict=True)}
        spanned = batches.values - np.stack([of_class[int(each)] for each in batches.labels])
        ratios = np.stack(
            [
                _ratio(along, (value - known.centers[label]) @ known.axes, count, precision)
                for value, count in zip(batches.values[mine], batches.counts[mine], strict=True)
            ],
            axis=1,
        )
        ordered = np.sort(ratios, axis=1)
        second = ordered[:, -2] if ordered.shape[1] > 1 else ordered[:, -1]
        return np.stack(
            [span_shares(spanned, deviations), ordered[:, -1], ordered[:, -1] - second, of_mean, lengths],
            axis=1,
        )
    rows = block.rows.astype(np.float64)
    squares = np.maximum((rows**2).sum(axis=1), 1e-12)
    weights = deviations @ rows.T / squares  # the coefficients that the image would have
    white = np.sqrt(precision)
    images, rows_along = (deviations @ known.axes) * white, (rows @ known.axes) * white
    exact = block.diagonal + (rows**2).sum(axis=0)
    spread = exact / max(block.images - len(block.labels), 1)
    of_diagonal = (deviations**2) @ (exact - block.images * _public(known)) / np.square(spread).sum()
    found = [span_shares(rows, deviations), of_mean, of_diagonal, lengths, (weights**2).sum(axis=1)]
    found += [np.abs(weights).max(axis=1), (deviations**2) @ (1 / np.maximum(spread, spread.mean() / 100))]
    for strongest in STRONGEST:
        end = max(1, images.shape[1] - strongest)
        image, behind = images[:, :end], rows_along[:, :end]
        products, own = image @ behind.T, (image**2).sum(axis=1)
        found.append((weights * products).sum(axis=1) - (weights**2).sum(axis=1) * own / 2)
        found.append(span_shares(behind, image))
        found.append(((products / own[:, None]) ** 2).sum(axis=1))
    return np.stack(found, axis=1)


def measure(
    public: Pool,
    private: Pool,
    *,
    images: int,
    classes: int,
    members: int,
    seed: int,
    forms: Sequence[str] = FORMS,
) -> Iterator[Found]:
    """Train the attacker on devices of public images, and attack other devices, with about `members` images."""
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng([seed, images])
    order = rng.permutation(len(public.labels))
    half = len(order) // 2
    learned, trained_on = public.part(order[:half]), public.part(order[half:])
    known = study(learned.features, learned.labels)
    shadows = min(MOST_DEVICES, max(2 * LEAST_DEVICES, 2 * members // images))
    makers = {"train": (trained_on, shadows), "attack": (private, max(LEAST_DEVICES, shadows // 2))}
    cases: dict[str, list[tuple[Pool, Upload, NDArray[np.intp]]]] = {name: [] for name in makers}
    for name, (pool, number) in makers.items():
        while len(cases[name]) < number:
            mine, others = draw_rows(pool, images=images, classes=classes, rng=rng)
            made = upload(pool, mine, rng=rng)
            if made is not None:
                cases[name].append((pool, made, others))
    for form in forms:
        inside: list[Floats] = []
        outside: list[Floats] = []
        for pool, made, others in cases["train"]:
            for within, strangers in scored(pool, made, others, form, learned, known):
                inside.append(within)
                outside.append(strangers)
        rows = np.concatenate([*inside, *outside])
        truth = np.arange(len(rows)) < sum(map(len, inside))
        attacker = LogisticRegression(max_iter=2000, class_weight="balanced").fit(_curved(rows), truth)
        first, naive = [], []
        for pool, made, others in cases["attack"]:
            for within, strangers in scored(pool, made, others, form, learned, known):
                rivals = strangers[: CANDIDATES - 1]
                naive.append(within[:, 0] > rivals[:, 0].max())
                guessed = [attacker.decision_function(_curved(each)) for each in (within, rivals)]
                first.append(guessed[0] > guessed[1].max())
        yield Found(
            form=form,
            images=images,
            naive=float(np.concatenate(naive).mean()),
            trained=float(np.concatenate(first).mean()),
            members=sum(map(len, first)),
        )


def scored(
    pool: Pool, made: Upload, others: NDArray[np.intp], form: str, learned: Pool, known: Knowledge
) -> Iterator[tuple[Floats, Floats]]:
    """Yield the scores of members and of other images of each class, relative to those of public images."""
    for label in made.block.labels.tolist():
        members = made.rows[pool.labels[made.rows] == label]
        strangers = others[pool.labels[others] == label][: 2 * CANDIDATES]
        reference = learned.features[learned.labels == label][:REFERENCES]
        parts = [pool.features[members], pool.features[strangers], reference]
        found = scores(made, form, label, np.concatenate(parts), known)
        inside, outside, of_public = np.split(found, np.cumsum([len(members), len(strangers)]))
        center, spread = of_public.mean(axis=0), np.maximum(of_public.std(axis=0), 1e-9)
        yield (inside - center) / spread, (outside - center) / spread


def _curved(rows: Floats) -> Floats:
    """Return scores with their squares, within bounds that outliers would otherwise set."""
    bounded = np.clip(rows, -8, 8)
    return np.concatenate([bounded, bounded**2 / 4], axis=1)


def _ratio(along: Floats, center: NDArray[np.floating], count: int, precision: Floats) -> Floats:
    """Return the log of the ratio of likelihoods that images are in a mean of so many, and that they are not."""
    ratio: Floats = along @ (precision * center) - (along**2) @ precision / (2 * count)
    return ratio


def _public(known: Knowledge) -> Floats:
    """Return the public variance of each value within classes."""
    variances: Floats = np.square(known.axes) @ known.variances.astype(np.float64)
    return variances
