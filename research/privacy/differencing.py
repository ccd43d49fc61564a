"""Differencing: what two submissions disclose together when one image was added in between."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.prototypes import average_class
from research.privacy.decoder import Decoder, decode
from research.privacy.leakage import CANDIDATES, best_ssim
from research.privacy.reconstruction import Scene


def submit(
    features: NDArray[np.float32], *, batch: int, alpha: float, seed: Sequence[int]
) -> tuple[NDArray[np.float16], NDArray[np.uint32]]:
    """Return a device's upload of one class: float16 prototypes (m, L) and their counts (m,).

    The features (n, L) are in the order of the images' names. A device has the same seed for a class of a task,
    whatever its images are.
    """
    values, counts = average_class(features, batch=batch, rng=np.random.default_rng(seed), alpha=alpha)
    return values.astype(np.float16), counts


def added_feature(
    before: tuple[NDArray[np.float16], NDArray[np.uint32]],
    after: tuple[NDArray[np.float16], NDArray[np.uint32]],
) -> NDArray[np.float32]:
    """Subtract the weighted sum of a class's prototypes from that of the next submission: the new feature, (L,).

    Exact but for the rounding to float16, where filtering dropped the same images both times.
    """
    first, second = (
        counts.astype(np.float64) @ values.astype(np.float64) for values, counts in (before, after)
    )
    added: NDArray[np.float32] = (second - first).astype(np.float32)
    return added


def unmix(
    submissions: Sequence[tuple[NDArray[np.float16], NDArray[np.uint32]]], *, batch: int, seed: Sequence[int]
) -> NDArray[np.float32]:
    """Solve for single features, (n, L), with a known shuffle; a few stay mixed.

    Each prototype is a linear equation. Nothing was filtered, and each submission has one image more than the one
    before, at the end: so the number of unknowns hardly grows, and that of equations does.
    """
    images = int(submissions[-1][1].sum())
    rows, known = [], []
    for values, counts in submissions:
        had = int(counts.sum())
        one_hot = np.eye(had, dtype=np.float32)
        shares, _ = average_class(one_hot, batch=batch, rng=np.random.default_rng(seed))
        rows.append(np.pad(shares.astype(np.float64), ((0, 0), (0, images - had))))
        known.append(values.astype(np.float64))
    solved: NDArray[np.float64] = np.linalg.lstsq(np.concatenate(rows), np.concatenate(known), rcond=None)[0]
    return solved.astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Resubmitted:
    """Disclosure by submissions of nearly the same images."""

    batch: int
    error: float
    """Median relative error, around its class mean, of the feature of an image added between two submissions."""
    ssim: float
    """Mean SSIM of its reconstruction to the image."""
    top_1: float
    """Share of the images that are distinguished from 99 non-members of their class."""
    submissions: int
    """Submissions after which an attacker with the shuffle has as many equations as unknowns."""
    all_error: float | None
    """Median relative error of every feature of the device by then; None if it has too few images."""


def resubmit(scene: Scene, decoder: Decoder, *, batch: int, images: int, seed: int) -> Resubmitted:
    """Compare a submission of `images` of a class with the next one, which has an image more, class by class."""
    errors, found, similar, solved, submissions = [], [], [], [], 0
    rng = np.random.default_rng(seed)
    for label, non_members in scene.non_members.items():
        rows = scene.device[scene.labels[scene.device] == label]
        mine, center = scene.features[rows], scene.features[rows].mean(axis=0)
        key = (seed, label)
        for newest in range(images, min(images + 10, len(rows))):
            before, after = (
                submit(mine[:had], batch=batch, alpha=0.99, seed=key) for had in (newest, newest + 1)
            )
            added = added_feature(before, after)
            errors.append(_error(added, mine[newest], center))
            others = scene.features[rng.permutation(non_members)[: CANDIDATES - 1]]
            nearest = np.linalg.norm(others - added, axis=1).min()
            found.append(bool(np.linalg.norm(mine[newest] - added) < nearest))
            reconstructed = decode(decoder, added[None], scene.images.shape[1:])[0]
            similar.append(best_ssim(reconstructed, scene.images[rows[newest]][None]))
        submissions = _enough(images, batch)
        if images + submissions - 1 <= len(mine):
            uploaded = [
                submit(mine[: images + more], batch=batch, alpha=1.0, seed=key) for more in range(submissions)
            ]
            every = unmix(uploaded, batch=batch, seed=key)
            solved += [_error(one, true, center) for one, true in zip(every, mine, strict=False)]
    return Resubmitted(
        batch=batch,
        error=float(np.median(errors)),
        ssim=float(np.mean(similar)),
        top_1=float(np.mean(found)),
        submissions=submissions,
        all_error=float(np.median(solved)) if solved else None,
    )


def _enough(images: int, batch: int) -> int:
    """Return the submissions, each with an image more, that give as many equations as features, and one more."""
    submissions, equations = 1, max(images // batch, 1)
    while equations < images + submissions - 1:
        equations += max((images + submissions) // batch, 1)
        submissions += 1
    return submissions + 1


def _error(found: NDArray[np.float32], true: NDArray[np.float32], center: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(found - true) / np.linalg.norm(true - center))
