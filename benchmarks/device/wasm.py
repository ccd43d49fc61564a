"""Backbones in ONNX Runtime's WebAssembly with one thread, as in a browser: 8 bits beside float32, and photographs.

`device wasm` runs the same module in Node and in a headless Chromium, all jobs in turns, since the machine may be busy:
read the ratios. The seconds of the fastest turn come nearest to an idle machine. Weights are as in `device int8`.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from msgspec import to_builtins
from PIL import Image
from sklearn.datasets import load_sample_image

from aggregator.algorithms.fedtc.head import Dense
from aggregator.graphs.head_export import head_to_onnx
from benchmarks.device.int8 import make_pair, photos_folder
from benchmarks.options import repeated
from benchmarks.report import ROOT, Table, json_option, write_json
from protocol.errors import ProtofleetError
from protocol.models.onnx_metadata import BackboneMetadata, HeadMetadata

NETWORKS = ("tf_mobilenetv3_small_100", "mobilenetv2_100")
PHOTOS = {"1280 x 720": (1280, 720), "4000 x 3000": (4000, 3000)}
CLASSES = 10
MODULE = "benchmarks/device/wasm.mjs"
ORIGIN = "https://benchmark.example"

Times = Mapping[str, Sequence[float]]
"""Milliseconds of a job in each turn, by its name."""

PRECISION_COLUMNS = {
    "network": "<26", "in": "<10", "float32, ms": ">13.1f", "int8, ms": ">10.1f", "ratio": ">7.2f",
    "fastest float32": ">17.1f", "fastest int8": ">14.1f", "float32 MB": ">12.2f", "int8 MB": ">9.2f",
}  # fmt: skip
PHOTO_COLUMNS = {
    "photograph": "<13", "in": "<10", "JPEG, ms": ">10.0f", "preprocessing, ms": ">19.0f",
    "features, ms": ">14.0f", "fastest features": ">18.0f",
}  # fmt: skip
HEAD_COLUMNS = {"network": "<26", "in": "<10", "head, ms": ">10.3f", "heads/s": ">9,.0f"}


@click.command("wasm")
@repeated(
    "--network", "networks", default=NETWORKS, help="Of timm; may be repeated. Photographs are for the first."
)
@click.option("--image-size", type=click.IntRange(min=32), default=224, show_default=True)
@click.option(
    "--photos",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of photos to calibrate 8 bits on  [default: photos.zip in the data folder]",
)
@click.option("--repetitions", type=click.IntRange(min=1), default=9, show_default=True)
@json_option
def command(
    *, networks: Sequence[str], image_size: int, photos: Path | None, repetitions: int, json_file: Path | None
) -> None:
    """Measure backbones, heads and photographs in WebAssembly: in Node, and in Chromium if it is installed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        calibration = photos or photos_folder(folder)
        metadata = {name: _write_network(name, image_size, calibration, folder) for name in networks}
        _write_photos(folder)
        jobs = {
            "networks": to_builtins(metadata),
            "photos": [
                {"file": name, "width": width, "height": height} for name, (width, height) in PHOTOS.items()
            ],
        }
        (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
        runs: dict[str, Times] = {"Node": _in_node(folder, repetitions)}
        if chromium := shutil.which("chromium"):
            runs["Chromium"] = _in_chromium(chromium, folder, repetitions)
        tables = _tables(networks, runs, folder)
    write_json(json_file, "wasm", tables=tables, milliseconds=runs)


def _write_network(name: str, image_size: int, photos: Path, folder: Path) -> BackboneMetadata:
    """Write a network in both precisions, and a random head for its features."""
    files = {precision: folder / f"{name}-{precision}.onnx" for precision in ("float32", "int8")}
    metadata = make_pair(name, image_size, photos, files)["float32"].metadata
    size = metadata.feature_size
    classes = tuple(map(str, range(CLASSES)))
    weights = np.random.default_rng(0).normal(size=(CLASSES, size)).astype(np.float32)
    head = HeadMetadata(
        classes=classes, version=1, task="0" * 64, backbones=("0" * 64,), feature_size=size, training={}
    )
    layer = Dense(weights, np.zeros(CLASSES, np.float32))
    (folder / f"{name}-head.onnx").write_bytes(head_to_onnx([layer], metadata=head))
    return metadata


def _write_photos(folder: Path) -> None:
    """Write scikit-learn's photograph in each size, as JPEG and as pixels."""
    photograph = Image.fromarray(load_sample_image("china.jpg"))
    for name, size in PHOTOS.items():
        resized = photograph.resize(size, Image.Resampling.BICUBIC)
        resized.save(folder / f"{name}.jpg", quality=90)
        (folder / f"{name}.raw").write_bytes(resized.convert("RGBA").tobytes())


def _in_node(folder: Path, repetitions: int) -> Times:
    node = shutil.which("node")
    if node is None:
        raise ProtofleetError("node is not installed: apt-get install nodejs")
    arguments = (node, str(ROOT / MODULE), f"{folder.as_uri()}/", str(repetitions))
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProtofleetError(f"{MODULE}: {done.stderr[-2000:]}")
    times: Times = json.loads(done.stdout)
    return times


def _in_chromium(chromium: str, folder: Path, repetitions: int) -> Times:
    """Run the module in a page; files reach it without a server."""
    from playwright.sync_api import Route, sync_playwright

    def answer(route: Route) -> None:
        path = route.request.url.removeprefix(f"{ORIGIN}/").replace("%20", " ")
        if path:
            route.fulfill(
                path=folder / path.removeprefix("files/") if path.startswith("files/") else ROOT / path
            )
        else:
            route.fulfill(body="<!doctype html>", content_type="text/html")

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.route(f"{ORIGIN}/**", answer)
        page.goto(f"{ORIGIN}/")
        script = f"import('/{MODULE}').then((module) => module.measure('{ORIGIN}/files/', {repetitions}))"
        times: Times = page.evaluate(script)
        browser.close()
    return times


def _tables(networks: Sequence[str], runs: Mapping[str, Times], folder: Path) -> list[Table]:
    precisions = Table(PRECISION_COLUMNS, title="One image, one thread, medians and the fastest turn")
    for name in networks:
        sizes = [
            (folder / f"{name}-{precision}.onnx").stat().st_size / 1e6 for precision in ("float32", "int8")
        ]
        for place, times in runs.items():
            float32, int8 = (np.array(times[f"{name}, {precision}"]) for precision in ("float32", "int8"))
            medians = (np.median(float32), np.median(int8), np.median(float32 / int8))
            precisions.row(name, place, *medians, float32.min(), int8.min(), *sizes)
    first = networks[0]
    photographs = Table(PHOTO_COLUMNS, title=f"Photographs for {first}; features are without JPEG")
    for photo in PHOTOS:
        for place, times in runs.items():
            parts = [times.get(f"{first}, {photo}: {part}") for part in ("JPEG", "preprocessing", "features")]
            figures = [None if part is None else np.median(part) for part in parts]
            photographs.row(photo, place, *figures, min(times[f"{first}, {photo}: features"]))
    heads = Table(HEAD_COLUMNS, title=f"Heads of {CLASSES} classes")
    for name in networks:
        for place, times in runs.items():
            median: Any = np.median(times[f"{name}, head"])
            heads.row(name, place, median, 1e3 / median)
    return [precisions, photographs, heads]
