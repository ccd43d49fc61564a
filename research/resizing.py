"""`python -m research resizing`: what a platform's own resize costs, which differs from the contract's filter.

Heads are trained on features of images as the contract resizes them, one device for each domain of PACS, and classify
test images that were resized in other ways.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.data.features import BACKBONES, export_backbone
from benchmarks.data.images import PACS, Labeled, load_data, weights_folder
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from edge_client.graphs.backbone import Backbone, open_backbone
from protocol.models.preprocessing import preprocess
from protofleet.head import Head, train_head
from protofleet.prototypes import device_prototypes

CLASSES = tuple(map(str, range(7)))
CONTRACT = "the contract's"

Resize = Callable[[Image.Image, tuple[int, int]], Image.Image]
COLUMNS = {"network": "<26", "size": ">5", "factor": ">7.1f", "resize": ">25", "accuracy": ">9.1%"}


def bilinear_of_four(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Interpolate between the four nearest pixels, as `Bitmap.createScaledBitmap` does with its filter."""
    levels = np.asarray(image, np.float64)
    for axis, target in ((1, size[0]), (0, size[1])):
        edge = levels.shape[axis]
        place = np.clip((np.arange(target) + 0.5) * edge / target - 0.5, 0, edge - 1)
        first = np.floor(place).astype(int)
        share = (place - first).reshape([-1 if each == axis else 1 for each in range(3)])
        after = np.minimum(first + 1, edge - 1)
        levels = levels.take(first, axis) * (1 - share) + levels.take(after, axis) * share
    return Image.fromarray(np.rint(levels).astype(np.uint8))


RESIZES: Mapping[str, Resize] = {
    CONTRACT: lambda image, size: image.resize(size, Image.Resampling.BICUBIC),
    "bilinear, antialiased": lambda image, size: image.resize(size, Image.Resampling.BILINEAR),
    "bilinear of four pixels": bilinear_of_four,
    "nearest pixel": lambda image, size: image.resize(size, Image.Resampling.NEAREST),
}


@click.command("resizing")
@repeated("--network", "networks", default=("tf_mobilenetv3_small_100", "mobilenetv2_100"))
@repeated("--image-size", "sizes", type=click.IntRange(min=32), default=(128, 96, 64))
@json_option
def command(*, networks: Sequence[str], sizes: Sequence[int], json_file: Path | None) -> None:
    """Measure the accuracy of heads on images that were resized in other ways than the contract's."""
    table = Table(COLUMNS, title="Test images of PACS, 227 x 227, resized without a crop")
    data = {name: load_data(name) for name in PACS}
    for network in networks:
        for size in sizes:
            backbone = _backbone(network, size)
            head = _head(backbone, {name: each.train for name, each in data.items()})
            factor = data[PACS[0]].test.images.shape[1] / size
            for name, resize in RESIZES.items():
                hits = [_hits(head, backbone, each.test, resize) for each in data.values()]
                table.row(network, str(size), factor, name, float(np.concatenate(hits).mean()))
    write_json(json_file, "resizing", tables=[table])


def _backbone(network: str, size: int) -> Backbone:
    weights = weights_folder() / BACKBONES[network].file
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{network}-{size}.onnx"
        export_backbone(network, weights=weights, image_size=size, path=path)
        return open_backbone(path, provider="cpu", threads=1)


def _head(backbone: Backbone, devices: Mapping[str, Labeled]) -> Head:
    """Train a head of the prototypes of a device for each domain."""
    prototypes = {
        name: device_prototypes(_features(backbone, each.images, RESIZES[CONTRACT]), each.labels)
        for name, each in devices.items()
    }
    return train_head(prototypes, classes=CLASSES)


def _hits(head: Head, backbone: Backbone, test: Labeled, resize: Resize) -> NDArray[np.bool_]:
    found = head.predict_proba(_features(backbone, test.images, resize)).argmax(axis=1)
    return np.asarray(found == test.labels)


def _features(backbone: Backbone, images: NDArray[np.uint8], resize: Resize) -> NDArray[np.float32]:
    """Return features (n, L) of square images, which the contract's resize then leaves as they are."""
    spec = backbone.metadata.preprocessing
    pixels = [preprocess(resize(Image.fromarray(each), (spec.width, spec.height)), spec) for each in images]
    parts = (np.stack(pixels[at : at + 32]) for at in range(0, len(pixels), 32))
    return np.concatenate([backbone.features(part) for part in parts])
