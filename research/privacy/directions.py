"""`python -m research directions`: what an upload of `hierarchical` discloses beside FedTC's prototypes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.adapter import torch_device
from aggregator.algorithms.hierarchical import Hierarchical
from aggregator.graphs.tracing import to_torch
from benchmarks.data.features import BackboneType, load_features
from benchmarks.data.images import NAMES, load_data
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from research.privacy.decoder import Decoder
from research.privacy.leakage import (
    CANDIDATES,
    Knowledge,
    Linkage,
    Release,
    Score,
    by_likelihood,
    link,
    release_prototypes,
    study,
)
from research.privacy.reconstruction import Scene, learn_decoder, own_first, set_scene

PER_CLASS = 200
DEVICES = ("5x1", "20x1", "5x10", "10x10", "20x10", "200x10")
"""Images of a class, and classes, of a device."""

FLEET = 10
"""Devices of a kind, as far as PER_CLASS images of each class suffice."""

BEFORE, ADDED = 20, 5
"""Images of each class on a device, and those that are added to one class: `batch_size` are released at once."""

DEVIATIONS = 2.0
"""Steps along a direction, in its deviations, at which the attacker reconstructs an image."""

COLUMNS = {
    "images x classes": "<17",
    "directions": ">11",
    "AUC, means": ">12.1%",
    "and directions": ">16.1%",
    "1/100, means": ">14.1%",
    "with both": ">11.1%",
    "own first, means": ">18.1%",
    "along directions": ">18.1%",
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """Disclosure by the uploads of devices of one kind, mean over the devices."""

    devices: str
    directions: float
    """Directions that a device uploads."""
    means: Linkage
    both: Linkage
    """By the class means and the directions together."""
    means_first: float
    """Share of reconstructions from class means that are more similar to the device's images than to others."""
    directions_first: float
    """The same of reconstructions from points on both sides of a class mean along a direction."""


@click.command("directions")
@click.option("--data", type=click.Choice(NAMES), default="fashion_mnist", show_default=True)
@click.option("--backbone", type=BackboneType(), default="mobilenetv2_100", show_default=True)
@click.option("--image-size", type=click.IntRange(min=32), default=96, show_default=True)
@click.option("--public", type=int, default=10_000, show_default=True, help="Images the attacker has.")
@repeated("--device", "kinds", default=DEVICES, help="Images of a class x classes; may be repeated.")
@click.option("--decoder-epochs", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def command(
    *,
    data: str,
    backbone: str,
    image_size: int,
    public: int,
    kinds: Sequence[str],
    decoder_epochs: int,
    seed: int,
    json_file: Path | None,
) -> None:
    """Attack uploads of class means and directions, and FedTC's prototypes of the same images (B 5)."""
    features = load_features(data, backbone=backbone, image_size=image_size)
    scene = set_scene(load_data(data), features, public=public, per_class=PER_CLASS, seed=seed)
    decoder = learn_decoder(scene, epochs=decoder_epochs, seed=seed, device=torch_device("auto"))
    knowledge = study(*scene.public)
    release = release_prototypes(scene.features, scene.labels, scene.device, batch=5, seed=seed)
    linked = _link(scene, by_likelihood(release, scene.features, scene.labels, knowledge), release)
    first = own_first(scene, release, release.values, decoder, seed=seed)
    click.echo(f"prototypes, B 5: AUC {linked.auc:.1%}, 1/100 {linked.top_1:.1%}, own first {first:.1%}")
    table = Table(COLUMNS, title=f"{data}: uploads of hierarchical")
    results = []
    for kind in kinds:
        found = measure(scene, kind, knowledge, decoder, seed=seed)
        results.append(found)
        table.row(
            *(kind, f"{found.directions:g}", found.means.auc, found.both.auc, found.means.top_1),
            *(found.both.top_1, found.means_first, found.directions_first),
        )
    new, others = added_images(scene, seed=seed)
    click.echo(
        f"{ADDED} images more: {new:.1%} of their offsets lie in the difference, {others:.1%} of others'"
    )
    write_json(json_file, "directions", data=data, runs=list(map(asdict, results)), added=[new, others])


def measure(scene: Scene, kind: str, knowledge: Knowledge, decoder: Decoder, *, seed: int) -> Result:
    """Attack devices of one kind."""
    each, classes = map(int, kind.split("x"))
    found = []
    for number in range(min(FLEET, PER_CLASS // each)):
        of_class = [scene.device[scene.labels[scene.device] == label] for label in scene.non_members]
        places = [(number + step) % len(of_class) for step in range(classes)]
        rows = np.concatenate([of_class[place][number * each :][:each] for place in sorted(places)])
        release, directions = _upload(scene, rows, seed=seed)
        of_means = by_likelihood(release, scene.features, scene.labels, knowledge)
        score = by_directions(release, scene.features, directions, knowledge)

        def of_both(
            mean: int, images: NDArray[np.intp], *, first: Score = of_means, more: Score = score
        ) -> NDArray[np.float64]:
            return first(mean, images) + more(mean, images)

        points, guess = _points(release, directions)
        found.append(
            (
                *(_link(scene, of_means, release), _link(scene, of_both, release)),
                own_first(scene, release, release.values, decoder, seed=seed),
                own_first(scene, points, guess, decoder, seed=seed),
                float(len(directions)),
            )
        )
    means, both, first, along, sent = zip(*found, strict=True)
    return Result(
        devices=kind,
        directions=float(np.mean(sent)),
        means=_mean(means),
        both=_mean(both),
        means_first=float(np.mean(first)),
        directions_first=float(np.mean(along)),
    )


def added_images(scene: Scene, *, seed: int) -> tuple[float, float]:
    """Return what is known of images that were added to a class between two submissions, and of non-members.

    It is the share of the square of an image's offset from the mean of the new ones that lies in the leading directions
    of the difference of both covariances. All of it would give the new images away but for a rotation.
    """
    found = []
    for label, non_members in scene.non_members.items():
        of_class = [scene.device[scene.labels[scene.device] == each] for each in scene.non_members]
        before = np.concatenate([rows[:BEFORE] for rows in of_class])
        new = of_class[list(scene.non_members).index(label)][BEFORE : BEFORE + ADDED]
        center = scene.features[new].mean(axis=0)
        units = _difference(scene, before, np.concatenate([before, new]), center, label=label, seed=seed)
        for rows in (new, non_members[: CANDIDATES - ADDED]):
            away = scene.features[rows] - center
            found.append(float((np.square(away @ units.T).sum(axis=1) / np.square(away).sum(axis=1)).mean()))
    return float(np.mean(found[::2])), float(np.mean(found[1::2]))


def _difference(
    scene: Scene,
    before: NDArray[np.intp],
    after: NDArray[np.intp],
    center: NDArray[np.float32],
    *,
    label: int,
    seed: int,
) -> NDArray[np.float32]:
    """Return the directions in which the scatter grew, without what follows from the means, which are known."""
    rows, signs = [], []
    for images, sign in ((after, 1.0), (before, -1.0)):
        release, directions = _upload(scene, images, seed=seed)
        rows.append(np.sqrt(len(images) - len(release.labels)) * directions)
        signs += [sign] * len(directions)
    old = int((scene.labels[before] == label).sum())
    (place,) = np.flatnonzero(release.labels == label)
    rows.append(np.sqrt(old * ADDED / (old + ADDED)) * (center - release.values[place])[None])
    signs.append(-1.0)
    basis, mixed = np.linalg.qr(np.concatenate(rows).T)
    _, axes = np.linalg.eigh((mixed * np.array(signs)) @ mixed.T)
    return np.asarray((basis @ axes[:, -(ADDED - 1) :]).T, dtype=np.float32)


def by_directions(
    release: Release, features: NDArray[np.float32], directions: NDArray[np.float32], knowledge: Knowledge
) -> Score:
    """Score by the log of the ratio of likelihoods of an image's offsets from its class's mean along directions.

    A device's images vary along them as much as the directions are long, other images as public ones do.
    """
    lengths = np.linalg.norm(directions, axis=1)
    units = directions / lengths[:, None]
    images = release.counts.sum()
    own = lengths**2 * images / max(images - len(release.counts), 1)
    public = np.square(units @ knowledge.axes) @ knowledge.variances

    def score(mean: int, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        share = 1 / release.counts[mean]
        squares = ((features[rows] - release.values[mean]) @ units.T).astype(np.float64) ** 2
        inside, outside = own * (1 - share), public * (1 + share)
        ratios: NDArray[np.float64] = (squares * (1 / outside - 1 / inside) - np.log(inside / outside)).sum(
            axis=1
        ) / 2
        return ratios

    return score


def _upload(scene: Scene, rows: NDArray[np.intp], *, seed: int) -> tuple[Release, NDArray[np.float32]]:
    """Return a device's class means, and its directions without zeros, by the algorithm's own functions."""
    settings, labels = Hierarchical(), scene.labels[rows]
    sizes = {"feature_size": scene.features.shape[1], "num_classes": len(scene.non_members)}
    tensors = {
        **to_torch(settings.first_tensors(**sizes, seed=seed)),
        **to_torch({"feature": scene.features[rows], "labels": labels}),
    }
    step = settings.functions(**sizes, seed=seed).step
    for _ in range(settings.epochs):
        tensors["directions"] = step.apply(tensors)["next_directions"]
    directions = tensors["directions"].numpy()
    owned = np.unique(labels)
    members = [rows[labels == label] for label in owned]
    means = np.stack([scene.features[own].mean(axis=0) for own in members])
    return Release.without_noise(means, owned, members), directions[np.abs(directions).sum(axis=1) > 0]


def _points(release: Release, directions: NDArray[np.float32]) -> tuple[Release, NDArray[np.float32]]:
    """Return points on both sides of each mean along each direction, as a release of as many prototypes."""
    steps = DEVIATIONS * np.concatenate([directions, -directions])
    each = np.repeat(np.arange(len(release.labels)), len(steps))
    guess = (release.values[:, None] + steps).reshape(-1, steps.shape[1]).astype(np.float32)
    points = replace(
        release,
        values=guess,
        labels=release.labels[each],
        counts=release.counts[each],
        noise=np.zeros(len(each)),
        members=tuple(release.members[mean] for mean in each),
    )
    return points, guess


def _link(scene: Scene, score: Score, release: Release) -> Linkage:
    return link(score, release, scene.non_members, rng=np.random.default_rng(0))


def _mean(found: Sequence[Linkage]) -> Linkage:
    return Linkage(*(float(np.mean([getattr(each, name) for each in found])) for name in ("auc", "top_1")))
