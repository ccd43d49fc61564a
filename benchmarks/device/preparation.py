"""Photographs, networks of random weights, and a device that has a head."""

import json
from pathlib import Path

import numpy as np

from benchmarks.processes import free_address, running
from protocol.errors import ProtofleetError

CLASSES = ("china", "flower")
LABELED = 20
"""Images that the head of a device is made of."""
TIMEOUT_S = 600.0


def write_photographs(folder: Path, *, count: int) -> None:
    """Cut `count` JPEG files of 200 to 400 pixels out of scikit-learn's two photographs, a class each."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(0)
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    for number in range(count):
        label = number % len(CLASSES)
        photograph = photographs[label]
        edge = int(random.integers(200, 401))
        left, top = (int(random.integers(side - edge)) for side in photograph.size)
        path = folder / CLASSES[label] / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph.crop((left, top, left + edge, top + edge)).save(path, quality=90)


def link_some(source: Path, target: Path, *, count: int) -> None:
    """Make a folder of the first `count` of another's images, without copying them."""
    for path in sorted(source.glob("*/*.jpg"), key=lambda path: path.name)[:count]:
        link = target / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.hardlink_to(path)


def export_random(model: str, *, image_size: int, folder: Path) -> Path:
    """Export a network with random weights, for images resized without a crop."""
    from export.backbones import Choice, load_backbone
    from export.to_onnx import export_module

    path = folder / f"{model}-{image_size}.onnx"
    loaded = load_backbone(Choice(model, random=True, image_size=image_size, crop_pct=1.0))
    export_module(loaded.module, loaded.metadata, path=path)
    return path


def train_head(folder: Path, backbone: Path, images: Path) -> None:
    """Run an aggregator and one device until it has a head; their states are `aggregator` and `device`.

    Raises:
        ProtofleetError: the device failed.
    """
    folder.mkdir()
    task, broker = folder / "task.toml", str(free_address())
    task.write_text(f"classes = {json.dumps(CLASSES)}\nbackbones = [{json.dumps(str(backbone))}]\n")
    serve = (
        "--embedded-broker",
        "--broker",
        broker,
        "--task",
        str(task),
        "--state",
        str(folder / "aggregator"),
    )
    device = ("--broker", broker, "--once", "--data", str(images), "--state", str(folder / "device"))
    with (
        running("aggregator.cli", "run", *serve, log=folder / "aggregator.log"),
        running("edge_client.cli", *device, log=folder / "device.log") as process,
    ):
        if process.wait(TIMEOUT_S):
            raise ProtofleetError(f"the device failed:\n{(folder / 'device.log').read_text()[-2000:]}")
