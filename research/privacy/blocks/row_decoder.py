"""Decoders of the rows of a block: how much of an image they show, beside a mean of five images.

Each decoder is trained on uploads of public images. From one vector it reconstructs an image: one in a batch, or that
with the largest coefficient of a row, whose class and sign the attacker is told.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.wire.principal_prototypes import IMAGES_PER_ROW
from research.privacy.blocks.uploads import Pool, Upload, draw_rows, upload
from research.privacy.decoder import as_values, decode, train_decoder
from research.privacy.explained import STRENGTHS, ridges
from research.privacy.leakage import best_ssim, study

FORMS = ("image", "batch", "batch of the row's image", "row", "row, other images")
"""A single feature; the mean of five, each of which is reconstructed; the same for images of `row` alone; a row; and,
for comparison, of as many images that are not on the device, the one that would have its largest coefficient."""

VECTORS = 6_000
"""Vectors of a form that a decoder is trained on, at most."""

COMPARED = 150
"""Vectors of a form whose SSIM is computed, at most."""

ROWS = 400
"""Rows that are attacked, about."""

LEAST_DEVICES, MOST_DEVICES = 4, 60
"""Devices that are attacked."""


@dataclass(frozen=True)
class Seen:
    """Vectors (m, w) from which an image each is to be reconstructed, by its place in the pool (m,)."""

    vectors: NDArray[np.float32]
    images: NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the decoders show of the images of one form."""

    images: int
    form: str
    vectors: int
    linear_r2: float
    """Share of the variance of the pixels beyond the class's mean image that a linear decoder explains."""
    linear_ssim: float
    """Mean SSIM of its reconstruction to the image."""
    decoder_r2: float
    decoder_ssim: float


def seen(pool: Pool, made: Upload, form: str, centers: NDArray[np.float32], others: NDArray[np.intp]) -> Seen:
    """Return what a form shows of a device's images, or of others; class means are less the public ones."""
    block, batches = made.block, made.batches
    if form == "image":
        return Seen(pool.features[made.rows] - centers[pool.labels[made.rows]], made.rows)
    if form.startswith("row"):
        rows, coefficients = made.rows, made.coefficients
        strongest = np.abs(coefficients).argmax(axis=1)
        if form != "row":
            rows, coefficients = others, _would_be(pool, made, others)
            strongest = np.abs(coefficients).argmax(axis=1)
        signs = np.sign(coefficients[np.arange(len(strongest)), strongest])
        labels = pool.labels[rows[strongest]]
        means = block.means[np.searchsorted(block.labels, labels)] - centers[labels]
        vectors = np.concatenate([signs[:, None] * block.rows, means], axis=1)
        return Seen(vectors.astype(np.float32), rows[strongest])
    counts = [len(members) for members in batches.members]
    vectors = np.repeat(batches.values - centers[batches.labels], counts, axis=0).astype(np.float32)
    places = np.concatenate(batches.members)
    if form == "batch":
        return Seen(vectors, made.rows[places])
    chosen = np.isin(places, np.abs(made.coefficients).argmax(axis=1))
    return Seen(vectors[chosen], made.rows[places[chosen]])


def measure(
    public: Pool,
    private: Pool,
    *,
    images: int,
    classes: int,
    epochs: int,
    seed: int,
    device: str,
    forms: Sequence[str] = FORMS,
) -> Iterator[Shown]:
    """Train decoders on uploads of public images, and reconstruct images of other devices.

    With 0 epochs, there is no network, and its figures are NaN.
    """
    rng = np.random.default_rng([seed, images])
    shadows = [_device(public, images, classes, rng) for _ in range(max(30, min(400, 20_000 // images)))]
    number = max(LEAST_DEVICES, min(MOST_DEVICES, ROWS * IMAGES_PER_ROW // images))
    attacked = [_device(private, images, classes, rng) for _ in range(number)]
    centers = study(public.features, public.labels).centers
    looks = np.stack(
        [as_values(public.images[public.labels == label]).mean(axis=0) for label in range(len(centers))]
    )
    decoders = {}
    for form in forms:
        kind = form.split()[0].rstrip(",")
        if kind not in decoders:
            known = _joined([seen(public, made, kind, centers, rest) for made, rest in shadows], VECTORS, rng)
            inputs = np.concatenate([known.vectors, centers[public.labels[known.images]]], axis=1)
            targets = public.images[known.images]
            network = (
                train_decoder(inputs, targets, epochs=epochs, seed=seed, device=device) if epochs else None
            )
            decoders[kind] = network, _line(public, known, looks)
        network, line = decoders[kind]
        found = _joined([seen(private, made, form, centers, rest) for made, rest in attacked], None, rng)
        labels, own = private.labels[found.images], as_values(private.images[found.images])
        of_line = looks[labels] + (found.vectors @ line).reshape(own.shape)
        inputs = np.concatenate([found.vectors, centers[labels]], axis=1)
        of_network = np.full_like(own, np.nan) if network is None else decode(network, inputs, own.shape[1:])
        total = float(np.square(own - looks[labels]).sum())
        figures = []
        for decoded in (of_line, of_network):
            similar = [
                best_ssim(one, image[None])
                for one, image in zip(decoded[:COMPARED].clip(0, 1).astype(np.float32), own, strict=False)
            ]
            figures += [1 - float(np.square(own - decoded).sum()) / total, float(np.mean(similar))]
        yield Shown(
            images=images,
            form=form,
            vectors=len(own),
            linear_r2=figures[0],
            linear_ssim=figures[1],
            decoder_r2=figures[2],
            decoder_ssim=figures[3],
        )


def _device(
    pool: Pool, images: int, classes: int, rng: np.random.Generator
) -> tuple[Upload, NDArray[np.intp]]:
    """Return a device's upload, and as many other images of its classes."""
    while True:
        mine, others = draw_rows(pool, images=images, classes=classes, rng=rng)
        made = upload(pool, mine, rng=rng)
        if made is not None:
            of_class = [others[pool.labels[others] == label] for label in made.block.labels]
            return made, np.concatenate([rows[: images // classes] for rows in of_class])


def _would_be(pool: Pool, made: Upload, others: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the coefficients (k, n) that images of another device would have of the rows."""
    labels = pool.labels[others]
    means = np.stack([pool.features[others[labels == label]].mean(axis=0) for label in made.block.labels])
    deviations = pool.features[others] - means[np.searchsorted(made.block.labels, labels)]
    rows = made.block.rows.astype(np.float64)
    coefficients: NDArray[np.float64] = (rows @ deviations.T) / np.square(rows).sum(axis=1, keepdims=True)
    return coefficients


def _joined(parts: Sequence[Seen], most: int | None, rng: np.random.Generator) -> Seen:
    vectors, images = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("vectors", "images")
    )
    some = rng.permutation(len(images))[:most]
    return Seen(vectors[some], images[some])


def _line(public: Pool, known: Seen, looks: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return weights (w, P) of deviations from the class's mean image, by ridge regression on public uploads."""
    pixels = as_values(public.images[known.images]) - looks[public.labels[known.images]]
    pixels = pixels.reshape(len(pixels), -1)
    end = int(0.8 * len(pixels))
    errors = {
        strength: float(np.square(pixels[end:] - known.vectors[end:] @ weights).sum())
        for strength, weights in ridges(known.vectors[:end], pixels[:end], (*STRENGTHS, 10.0, 100.0)).items()
    }
    best = min(errors, key=errors.__getitem__)
    return ridges(known.vectors, pixels, (best,))[best]
