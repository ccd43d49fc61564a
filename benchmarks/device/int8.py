"""Rate, size and agreement of backbones of 8 bits, beside the same ones in float32.

`device int8` runs both in turns within one process, since the machine may be busy: read the ratios. Networks without
published weights in the folder get random ones: time does not depend on them, agreement does.
"""

import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from benchmarks.data.features import BACKBONES, choice_of
from benchmarks.data.images import data_folder, weights_folder
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from edge_client.graphs.backbone import Backbone, open_backbone
from export.backbones import load_backbone
from export.int8 import HELD_OUT, Int8
from export.parity import photo_files, read_photo
from export.to_onnx import to_onnx
from protocol.errors import ConfigError
from protocol.models.onnx_metadata import BackboneMetadata, to_properties
from protocol.models.preprocessing import preprocess

NETWORKS = ("mobilenetv2_100", "tf_mobilenetv3_small_100", "resnet18", "resnet50")
BATCH_SIZE = 16

COLUMNS = {
    "network": "<26",
    "size": ">5",
    "float32, CPU ms": ">16.1f",
    "int8, CPU ms": ">13.1f",
    "CPU ratio": ">10.2f",
    "time ratio": ">11.2f",
    "int8 MB": ">9.2f",
    "of float32": ">11.1%",
    "worst cosine": ">13.4f",
    "median": ">8.4f",
}

Turns = Mapping[str, Sequence[tuple[float, float]]]
"""Seconds of a batch, by the clock and of the processor, by precision."""


@click.command("int8")
@repeated("--network", "networks", default=NETWORKS, help="Of timm; may be repeated.")
@repeated("--image-size", "sizes", type=click.IntRange(min=32), default=(224,))
@click.option(
    "--photos",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of photos to calibrate on and to compare  [default: photos.zip in the data folder]",
)
@click.option("--repetitions", type=click.IntRange(min=1), default=15, show_default=True)
@json_option
def command(
    *,
    networks: Sequence[str],
    sizes: Sequence[int],
    photos: Path | None,
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Compare backbones of 8 bits with float32: rate, size of the file, and agreement of the features."""
    title = f"{BATCH_SIZE} photographs at a time, threads: 1, medians of {repetitions} turns"
    table, runs = Table(COLUMNS, title=title), {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = photos or photos_folder(Path(temporary))
        for network in networks:
            for size in sizes:
                files = {name: Path(temporary) / f"{name}.onnx" for name in ("float32", "int8")}
                pair = make_pair(network, size, folder, files)
                images = _images(folder, pair["int8"].metadata)
                turns = take_turns(pair, images[:BATCH_SIZE], repetitions=repetitions)
                runs[f"{network}-{size}"] = turns
                table.row(network, str(size), *_figures(pair, turns, images[::HELD_OUT], files))
    write_json(json_file, "int8", tables=[table], seconds_of_a_batch=runs)


def photos_folder(folder: Path) -> Path:
    """Unzip the photos of the data folder."""
    archive = data_folder() / "photos.zip"
    if not archive.is_file():
        raise ConfigError(f"no {archive}: put photos there, or give a folder of them with --photos")
    with zipfile.ZipFile(archive) as photos:
        photos.extractall(folder / "photos")
    return folder / "photos"


def make_pair(network: str, size: int, photos: Path, files: Mapping[str, Path]) -> dict[str, Backbone]:
    """Export a network in both precisions to files; return the two as a device opens them."""
    torch.manual_seed(0)
    known = BACKBONES.get(network)
    weights = weights_folder() / known.file if known else None
    choice = choice_of(network, weights=weights if weights and weights.is_file() else None, image_size=size)
    click.echo(f"exporting and quantizing {network} at {size}", err=True)
    loaded = load_backbone(choice)
    file = to_onnx(loaded.module, loaded.metadata)
    files["float32"].write_bytes(file)
    opened = open_backbone(files["float32"], provider="cpu", threads=1)

    def reference(photo: Any) -> NDArray[np.float32]:
        feature: NDArray[np.float32] = opened.features(
            preprocess(photo, loaded.metadata.preprocessing)[None]
        )[0]
        return feature

    model, metadata = Int8(photos, min_cosine=-1.0).convert(file, loaded.metadata, reference)
    onnx.helper.set_model_props(model, to_properties(metadata))
    files["int8"].write_bytes(model.SerializeToString(deterministic=True))
    return {"float32": opened, "int8": open_backbone(files["int8"], provider="cpu", threads=1)}


def take_turns(
    pair: Mapping[str, Backbone], images: NDArray[np.uint8], *, repetitions: int
) -> dict[str, list[tuple[float, float]]]:
    """Return seconds of the clock and of the processor of each batch."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in pair}
    for backbone in pair.values():
        backbone.features(images)
    for _ in range(repetitions):
        for name, backbone in pair.items():
            started, on_cpu = time.perf_counter(), time.process_time()
            backbone.features(images)
            turns[name].append((time.perf_counter() - started, time.process_time() - on_cpu))
    return turns


def _figures(
    pair: Mapping[str, Backbone], turns: Turns, held_out: NDArray[np.uint8], files: Mapping[str, Path]
) -> list[float]:
    """Return a row's figures; processor time, which other programs change less, comes before that of the clock."""
    expected, found = (
        np.concatenate([backbone.features(image[None]) for image in held_out]).astype(np.float64)
        for backbone in (pair["float32"], pair["int8"])
    )
    lengths = np.linalg.norm(expected, axis=1) * np.linalg.norm(found, axis=1)
    cosines = (expected * found).sum(axis=1) / lengths
    sizes = [files[name].stat().st_size for name in ("float32", "int8")]
    float32, int8 = (np.array(turns[name]) for name in ("float32", "int8"))
    wall, cpu = np.median(float32 / int8, axis=0)
    milliseconds = [1e3 * float(np.median(each[:, 1])) for each in (float32, int8)]
    shares = [sizes[1] / 1e6, sizes[1] / sizes[0]]
    return [*milliseconds, float(cpu), float(wall), *shares, float(cosines.min()), float(np.median(cosines))]


def _images(folder: Path, metadata: BackboneMetadata) -> NDArray[np.uint8]:
    return np.stack([preprocess(read_photo(path), metadata.preprocessing) for path in photo_files(folder)])
