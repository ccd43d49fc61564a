"""`python -m research novelty`: images of no known class, by the novelty of the head and by other scores."""

from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from aggregator.algorithms.novelty import class_directions, novelty_threshold
from benchmarks.data.features import backbone_file, features_of, load_features
from benchmarks.data.images import load_data, sample
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from edge_client.graphs.backbone import open_backbone
from protocol.statistics.confidence import novelty_bins
from protocol.wire.messages import CONFIDENCE_BINS

HELD_OUT, DRAWS = 100, 20
"""Held-out images of the fleet for a threshold, and draws of them."""

FOREIGN = 500
"""Images of each foreign set."""

BACKBONE = "mobilenetv2_100"

SETS = {
    "pacs_photo": (224, ("pacs_sketch", "pacs_art_painting", "cifar10", "dark", "blurred")),
    "pacs_art_painting": (224, ("pacs_sketch", "pacs_photo", "cifar10", "dark", "blurred")),
    "cifar10": (96, ("mnist", "fashion_mnist", "pacs_photo", "dark", "new classes")),
    "fashion_mnist": (96, ("mnist", "cifar10", "pacs_photo", "dark", "new classes")),
}
"""Known sets with the image size and foreign images: other sets, the same images distorted, and further classes."""

DISTORTIONS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "dark": lambda image: image.point(lambda value: value // 16),
    "blurred": lambda image: image.filter(ImageFilter.GaussianBlur(max(image.size) / 40)),
}

COLUMNS = {
    "known": "<18", "images": ">6", "foreign": "<18", "cosine": ">7.1%", "Mahalanobis": ">11.1%", "nearest": ">8.1%",
    "softmax": ">8.1%", "found": ">7.1%", "false": ">7.1%",
}  # fmt: skip

Score = Callable[[NDArray[np.float32]], NDArray[np.floating]]
Labeled = tuple[NDArray[np.float32], NDArray[np.int64]]


@click.command("novelty")
@click.option("--layers", default="", help="Blocks, such as residual.  [default: the last layer]")
@repeated("--known", "names", type=click.Choice(list(SETS)), default=tuple(SETS))
@click.option(
    "--at-most", type=click.IntRange(min=70), default=6000, show_default=True, help="Images to train on."
)
@json_option
def command(*, layers: str, names: tuple[str, ...], at_most: int, json_file: Path | None) -> None:
    """Compare scores by the area under the ROC curve, and find images above the threshold of held-out images."""
    backbone = f"{BACKBONE}:{layers}" if layers else BACKBONE
    runs, table = [], Table(COLUMNS, title=f"{backbone}, threshold of {HELD_OUT} held-out images")
    for name in names:
        size, foreign = SETS[name]
        whole = load_features(name, backbone=backbone, image_size=size)
        rows = np.random.default_rng(0).permutation(len(whole.train))[:at_most]
        train, test = (whole.train[rows], whole.train_labels[rows]), (whole.test, whole.test_labels)
        for other in foreign:
            known, members = train, test
            if other == "new classes":
                known, members = _first_classes(train), _first_classes(test)
                strangers = whole.test[whole.test_labels >= FIRST_CLASSES][:FOREIGN]
            elif other in DISTORTIONS:
                strangers = _distorted(name, other, backbone, size)
            else:
                strangers = load_features(other, backbone=backbone, image_size=size, at_most=FOREIGN).test
            figures = _figures(known, members[0], strangers)
            table.row(name, len(known[0]), other, *figures.values())
            runs.append({"known": name, "images": len(known[0]), "foreign": other, **figures})
    write_json(json_file, "novelty", tables=[table], layers=layers, runs=runs)


FIRST_CLASSES = 7


def _first_classes(data: Labeled) -> Labeled:
    is_first = data[1] < FIRST_CLASSES
    return data[0][is_first], data[1][is_first]


def _distorted(name: str, distortion: str, backbone: str, size: int) -> NDArray[np.float32]:
    """Return the features of distorted test images."""
    change = DISTORTIONS[distortion]
    images = sample(load_data(name).test, FOREIGN).images
    changed = np.stack([np.asarray(change(Image.fromarray(image))) for image in images])
    return features_of(changed, open_backbone(backbone_file(backbone, image_size=size)), distortion)


def _figures(
    train: Labeled, members: NDArray[np.float32], strangers: NDArray[np.float32]
) -> dict[str, float]:
    """Return the area under each score's curve, and what the threshold finds of strangers and of members."""
    from sklearn.metrics import roc_auc_score

    truth = np.repeat([0, 1], [len(members), len(strangers)])
    curves = {}
    for name, score in _scores(*train):
        values = [score(members), score(strangers)]
        curves[name] = float(roc_auc_score(truth, np.concatenate(values)))
        if name == "cosine":
            novelty = values
    return {**curves, **_found(*novelty)}


def _scores(features: NDArray[np.float32], labels: NDArray[np.int64]) -> Iterator[tuple[str, Score]]:
    """Yield scores that are greater for foreign images, with the means and the covariance within classes."""
    from sklearn.covariance import LedoitWolf
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    classes, places = np.unique(labels, return_inverse=True)
    means = np.stack([features[places == each].mean(axis=0) for each in range(len(classes))])
    yield "cosine", class_directions(means).novelty
    covariance = LedoitWolf(assume_centered=True).fit(features - means[places])
    root = np.linalg.cholesky(covariance.precision_).astype(np.float32)
    yield "Mahalanobis", lambda rows: _nearest(rows @ root, means @ root)
    yield "nearest", lambda rows: _nearest(rows, means)
    discriminant = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto").fit(features, labels)
    yield "softmax", lambda rows: -discriminant.predict_proba(rows).max(axis=1)


def _nearest(rows: NDArray[np.float32], means: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(np.min([np.square(rows - mean).sum(axis=1) for mean in means], axis=0))


def _found(members: NDArray[np.float32], strangers: NDArray[np.float32]) -> dict[str, float]:
    """Return the shares above the thresholds of held-out images, in the mean over draws."""
    found, false = [], []
    for draw in range(DRAWS):
        order = np.random.default_rng(draw).permutation(len(members))
        bins = novelty_bins(members[order[:HELD_OUT]])
        threshold = novelty_threshold(np.bincount(bins, minlength=CONFIDENCE_BINS).astype(float))
        found.append((strangers > threshold).mean())
        false.append((members[order[HELD_OUT:]] > threshold).mean())
    return {"found": float(np.mean(found)), "false": float(np.mean(false))}
