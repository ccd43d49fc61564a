"""Features of whole data sets from an exported backbone, extracted once and kept on disk."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import click
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.data.images import MissingFile, load_data, sample, weights_folder
from edge_client.graphs.backbone import Backbone, open_backbone
from protocol.models.onnx_metadata import to_properties
from protocol.models.preprocessing import preprocess
from protocol.storage.blobstore import file_digest
from protofleet.simulation.fleet import Features

if TYPE_CHECKING:
    from export.backbones import Choice

IMAGES_PER_RUN = 128
HALF = (0.5, 0.5, 0.5)
VALIDATION = 10_000
"""Training images that are held out for validation."""

SPLIT_SEED = 12345

CALIBRATION = 200
"""Training images that a quantized backbone is calibrated on."""

Precision = Literal["float32", "int8"]
"""The precision of a backbone."""


@dataclass(frozen=True)
class Weights:
    """A file of weights, and timm's arguments that fit it; `model` if it is not the backbone's name."""

    file: str
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""


BACKBONES: Mapping[str, Weights] = MappingProxyType(
    {
        "mobilenetv2_100": Weights("mobilenetv2_100.coral_qat_in1k.safetensors", {"pad_type": "same"}),
        "mobilenetv2_100_birds": Weights(
            "mobilenetv2_100.coral_qat_inat_birds.safetensors", {"pad_type": "same"}, model="mobilenetv2_100"
        ),
        "mobilenetv2_100_insects": Weights(
            "mobilenetv2_100.coral_qat_inat_insects.safetensors",
            {"pad_type": "same"},
            model="mobilenetv2_100",
        ),
        "resnet18.tv_in1k": Weights("resnet18.tv_in1k.safetensors"),
        "tf_mobilenetv3_small_100": Weights("tf_mobilenetv3_small_100.google_qat_in1k.safetensors"),
    }
)


class BackboneType(click.ParamType[str]):
    """A command's option: some of BACKBONES, each with layers as in `export-backbone --layers` or without."""

    name = "NAME[:LAYER,...][+NAME...]"

    def convert(self, value: str, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """Return the value; fails unless it names backbones."""
        if any(each.partition(":")[0] not in BACKBONES for each in value.split("+")):
            self.fail(f"expected one of {', '.join(BACKBONES)}, got {value!r}", parameter, context)
        return value


def cache_folder() -> Path:
    """Return where features are kept: PROTOFLEET_BENCH_CACHE, or ~/.cache/protofleet-bench."""
    return Path(os.environ.get("PROTOFLEET_BENCH_CACHE", Path.home() / ".cache" / "protofleet-bench"))


def load_features(
    data: str,
    *,
    backbone: str,
    image_size: int,
    at_most: int | None = None,
    precision: Precision = "float32",
) -> Features:
    """Return the features of a data set, as a device would extract them; from the cache the second time.

    Images are resized to a square without a crop; of each part, `at_most` so many are used. A backbone of 8 bits is
    calibrated on training images of the data set. The blocks of NAME:LAYER,... are columns of the features of NAME:all.
    Those of several backbones, NAME+NAME, are side by side.

    Raises:
        MissingFile: the data or the weights are missing.
    """
    if "+" in backbone:
        parts = [
            load_features(data, backbone=each, image_size=image_size, at_most=at_most, precision=precision)
            for each in backbone.split("+")
        ]
        return replace(
            parts[0],
            train=np.concatenate([part.train for part in parts], axis=1),
            test=np.concatenate([part.test for part in parts], axis=1),
            normalized=all(part.normalized for part in parts),
            widths=tuple(part.train.shape[1] for part in parts),
            layers=tuple(width for part in parts for width in part.layers or (part.train.shape[1],)),
        )
    name, _, layers = backbone.partition(":")
    if precision == "int8" or not layers:
        graph = backbone_file(backbone, image_size=image_size)
        blocks = _block_names(graph) if layers else [""]
        graph = quantized_file(graph, data=data) if precision == "int8" else graph
    else:
        graph = backbone_file(f"{name}:all", image_size=image_size)
        known, blocks = _block_names(graph), [f"/{layer}" for layer in layers.split(",")]
        if not set(blocks) <= set(known):  # a group, or a block that `all` leaves out
            selected = backbone_file(backbone, image_size=image_size)
            blocks = _block_names(selected)
            graph = graph if set(blocks) <= set(known) else selected
    file = graph.parent / f"{cached_name(data, at_most)}.npz"
    if not file.is_file():
        _extract(data, open_backbone(graph), file, at_most=at_most)
    with np.load(file) as arrays:
        train, test = (
            np.concatenate([arrays[part + block] for block in blocks], axis=1) for part in ("train", "test")
        )
        labels = {part: arrays[part] for part in ("train_labels", "test_labels")}
        widths = tuple(arrays["test" + block].shape[1] for block in blocks)
    return Features(train=train, test=test, **labels, normalized=bool(layers), layers=widths)


def _block_names(graph: Path) -> list[str]:
    """Return what distinguishes the blocks' arrays in the cache; features without blocks are one array."""
    return [f"/{block.name}" for block in open_backbone(graph).metadata.blocks or ()] or [""]


def prepared(features: Features, *, root: bool, validation: bool, seed: int = SPLIT_SEED) -> Features:
    """Take the square root of features, which is not in the product, or hold out images for validation.

    With `validation`, VALIDATION of the training images take the place of the test images, a quarter if there are no
    more; the seed chooses them.
    """
    train, labels, test, truth = (
        *(features.train, features.train_labels),
        *(features.test, features.test_labels),
    )
    if validation:
        order = np.random.default_rng(seed).permutation(len(labels))
        number = VALIDATION if len(order) > VALIDATION else len(order) // 4
        held_out, rows = order[:number], order[number:]
        train, labels, test, truth = train[rows], labels[rows], train[held_out], labels[held_out]
    if root:
        train, test = (np.sign(part) * np.sqrt(np.abs(part)) for part in (train, test))
    return replace(features, train=train, train_labels=labels, test=test, test_labels=truth)


def cached_name(data: str, at_most: int | None = None) -> str:
    """Return the name under which features are kept, another one for another division into parts."""
    division = "-by-source" if data == "mnist_m" else ""
    return data + division + ("" if at_most is None else f"-{at_most}")


def backbone_file(backbone: str, *, image_size: int) -> Path:
    """Return one of BACKBONES, NAME or NAME:LAYER,..., as an ONNX file, exported the first time.

    Raises:
        MissingFile: the weights are missing.
    """
    name, _, layers = backbone.partition(":")
    weights = weights_folder() / BACKBONES[name].file
    if not weights.is_file():
        raise MissingFile(
            f"no {weights}: put it there, or point PROTOFLEET_BENCH_WEIGHTS at the folder that has it"
        )
    suffix = f"-{layers.replace(',', '+')}" if layers else ""
    folder = cache_folder() / f"{name}-{image_size}-{file_digest(weights).hex()[:16]}{suffix}"
    graph = folder / "backbone.onnx"
    if not graph.is_file():
        export_backbone(name, weights=weights, image_size=image_size, path=graph, layers=layers)
    return graph


def quantized_file(graph: Path, *, data: str) -> Path:
    """Return a backbone quantized to 8 bits, calibrated on a data set's training images the first time."""
    import msgspec
    import onnx

    from export.quantization import calibrate

    file = graph.parent / f"int8-{data}" / "backbone.onnx"
    if not file.is_file():
        click.echo(f"quantizing {graph} to {file}", err=True)
        images = sample(load_data(data).train, CALIBRATION).images
        metadata = open_backbone(graph).metadata
        pixels = (preprocess(Image.fromarray(image), metadata.preprocessing) for image in images)
        made = calibrate(onnx.load(graph), pixels).to_int8()
        onnx.helper.set_model_props(made, to_properties(msgspec.structs.replace(metadata, precision="int8")))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(made.SerializeToString(deterministic=True))
    return file


def choice_of(network: str, *, weights: Path | None, image_size: int) -> "Choice":
    """Return what `export` makes of one of BACKBONES or of timm's networks, for images resized without a crop."""
    from export.backbones import Choice

    known = BACKBONES.get(network, Weights(""))
    return Choice(
        known.model or network,
        weights=weights,
        random=weights is None,
        model_kwargs=known.model_kwargs or None,
        image_size=image_size,
        mean=HALF,
        std=HALF,
        crop_pct=1.0,
    )


def export_backbone(backbone: str, *, weights: Path, image_size: int, path: Path, layers: str = "") -> None:
    """Write one of BACKBONES as an ONNX file, for images resized to a square without a crop."""
    from export.backbones import load_backbone
    from export.layers import select_layers
    from export.to_onnx import export_module

    click.echo(f"exporting {backbone} to {path}", err=True)
    choice = choice_of(backbone, weights=weights, image_size=image_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    loaded = load_backbone(choice)
    if layers:
        loaded = select_layers(loaded, layers.split(","))
    export_module(loaded.module, loaded.metadata, path=path)


def _extract(data: str, backbone: Backbone, file: Path, *, at_most: int | None) -> None:
    images = load_data(data)
    train, test = (part if at_most is None else sample(part, at_most) for part in (images.train, images.test))
    blocks = backbone.metadata.blocks or ()
    ends = np.cumsum([block.width for block in blocks])[:-1].astype(int)
    names = [f"/{block.name}" for block in blocks] or [""]
    arrays: dict[str, Any] = {"train_labels": train.labels, "test_labels": test.labels}
    for part, chosen in (("train", train), ("test", test)):
        columns = np.split(features_of(chosen.images, backbone, f"{data} {part}"), ends, axis=1)
        arrays |= {part + name: values for name, values in zip(names, columns, strict=True)}
    unfinished = file.with_suffix(f".{os.getpid()}.part.npz")
    np.savez(unfinished, **arrays)
    unfinished.replace(file)


def features_of(images: NDArray[np.uint8], backbone: Backbone, label: str) -> NDArray[np.float32]:
    """Return the features (n, L) of images (n, H, W) or (n, H, W, 3), by the device's own functions."""
    spec = backbone.metadata.preprocessing
    features = np.empty((len(images), backbone.metadata.feature_size), dtype=np.float32)
    starts = range(0, len(images), IMAGES_PER_RUN)
    with click.progressbar(starts, label=f"features of {label}", file=sys.stderr) as bar:
        for start in bar:
            chunk = images[start : start + IMAGES_PER_RUN]
            batch = np.stack([preprocess(Image.fromarray(image), spec) for image in chunk])
            features[start : start + len(chunk)] = backbone.features(batch)
    return features
