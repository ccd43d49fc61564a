"""`python -m research drift`: distorted and foreign images that the drift score finds."""

from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter

from aggregator.algorithms.novelty import class_directions
from benchmarks.data.features import backbone_file, features_of, load_features
from benchmarks.data.images import load_data
from benchmarks.report import Table, json_option, write_json
from edge_client.apps.drift import WINDOW, drift_score
from edge_client.graphs.backbone import open_backbone
from protocol.wire.messages import DRIFT_LIMIT

BACKBONE, SIZE, DRAWS = "mobilenetv2_100:last,residual", 224, 20


def _covered(image: Image.Image) -> Image.Image:
    image = image.copy()
    image.paste((0, 0, 0), (0, 0, image.width // 3, image.height // 3))
    return image


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "none": lambda image: image,
    "brightness 1/4": lambda image: ImageEnhance.Brightness(image).enhance(0.25),
    "blur, 2 pixels": lambda image: image.filter(ImageFilter.GaussianBlur(2)),
    "tilt 15 degrees": lambda image: image.rotate(15),
    "tilt 30 degrees": lambda image: image.rotate(30),
    "contrast 2/5": lambda image: ImageEnhance.Contrast(image).enhance(0.4),
    "a ninth covered": _covered,
}

COLUMNS = {"images": "<18", "median": ">7.1f", "highest": ">8.1f", "found": ">6.0%"}


@click.command("drift")
@json_option
def command(*, json_file: Path | None) -> None:
    """Compare windows of photos, and of sketches, with the other half of the photos."""
    data = load_data("pacs_photo")
    images = np.concatenate([data.train.images, data.test.images])
    labels = np.concatenate([data.train.labels, data.test.labels])
    backbone = open_backbone(backbone_file(BACKBONE, image_size=SIZE))
    sets = {name: _features(images, change, backbone, name) for name, change in CHANGES.items()}
    sets["sketches"] = load_features("pacs_sketch", backbone=BACKBONE, image_size=SIZE).test
    photos, table, runs = sets["none"], Table(COLUMNS, title=f"{BACKBONE}, {WINDOW} images"), []
    for name, features in sets.items():
        scores = [_score(photos, labels, features, seed) for seed in range(DRAWS)]
        found = float(np.mean(np.array(scores) > DRIFT_LIMIT))
        table.row(name, float(np.median(scores)), max(scores), found)
        runs.append({"images": name, "scores": scores})
    write_json(json_file, "drift", tables=[table], runs=runs)


def _features(
    images: NDArray[np.uint8], change: Callable[[Image.Image], Image.Image], backbone: object, name: str
) -> NDArray[np.float32]:
    changed = np.stack([np.asarray(change(Image.fromarray(image))) for image in images])
    return features_of(changed, backbone, name)  # type: ignore[arg-type]


def _score(
    photos: NDArray[np.float32], labels: NDArray[np.int64], others: NDArray[np.float32], seed: int
) -> float:
    """Return the score of a window; the nearest class mean of the labeled half finds the classes."""
    order = np.random.default_rng(seed).permutation(len(photos))
    labeled, rest = np.split(order, [len(photos) // 2])
    chosen = rest[:WINDOW] if len(others) == len(photos) else slice(WINDOW)
    units = class_directions(
        np.stack([photos[labeled][labels[labeled] == each].mean(axis=0) for each in np.unique(labels)])
    ).units
    window = others[chosen]
    score = drift_score(
        photos[labeled], (photos[labeled] @ units.T).argmax(axis=1), window, (window @ units.T).argmax(axis=1)
    )
    return float("nan") if score is None else score
