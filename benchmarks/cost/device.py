"""Cost of the device program: memory over many images, and images per second; `start` has the rest.

`python -m benchmarks.cost.device --backbone FILE` measures in processes of their own and compares within the same run,
in turns, since the machine may be busy: read the ratios, not the seconds.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.report import json_option, print_figures, write_json

CLASSES = ("china", "flower")
Runs = dict[str, list[dict[str, float]]]
"""Figures of each process, by measurement."""


@click.command("device")
@click.option(
    "--backbone",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=Path("examples/quickstart/backbone.onnx"),
    show_default=True,
    help="Backbone that extracts; the larger it is, the less decoding matters.",
)
@click.option("--images", nargs=2, type=int, default=(1000, 5000), show_default=True, help="Few, and many.")
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=min(4, os.cpu_count() or 1), show_default=True)
@json_option
def device(
    *,
    backbone: Path,
    images: tuple[int, int],
    repetitions: int,
    batch_size: int,
    workers: int,
    json_file: Path | None,
) -> None:
    """Measure the device program: memory over many images, speed beside a plain loop."""
    runs: Runs = {}
    with tempfile.TemporaryDirectory() as folder:
        few, many = Path(folder) / "few", Path(folder) / "many"
        write_photographs(many, count=images[1])
        link_some(many, few, count=images[0])
        run = {"backbone": str(backbone.resolve()), "batch_size": batch_size, "workers": workers}
        programs = {
            "loop": _call("loop_once", data=str(few), **run),
            "extract_few": _call("extract_once", data=str(few), **run),
            "extract_many": _call("extract_once", data=str(many), **run),
        }
        _run_in_turns(programs, repetitions, runs)
    figures = figures_of(runs)
    table = print_figures(figures)
    write_json(json_file, "device", tables=[table], figures=figures, runs=runs)


def _run_in_turns(programs: Mapping[str, str], repetitions: int, runs: Runs) -> None:
    """Run each program in a process of its own, with an empty cache, and append what it reports to its runs."""
    for _ in range(repetitions):
        for name, program in programs.items():
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
            runs.setdefault(name, []).append(json.loads(done.stdout))


def figures_of(runs: Runs) -> dict[str, float]:
    """Return medians, and ratios of many to few images, and of the device program to the loop."""

    def median(name: str, figure: str) -> float:
        return statistics.median(entry[figure] for entry in runs[name])

    speeds = [
        (ours["images_per_second"], plain["images_per_second"])
        for ours, plain in zip(runs["extract_few"], runs["loop"], strict=True)
    ]
    peak_few, peak_many = (median(name, "memory_bytes") for name in ("extract_few", "extract_many"))
    return {
        "memory_few_mb": peak_few / 1e6,
        "memory_many_mb": peak_many / 1e6,
        "memory_ratio": peak_many / peak_few,
        "restart_seconds": median("extract_many", "restart_seconds"),
        "images_per_second": median("extract_few", "images_per_second"),
        "loop_images_per_second": median("loop", "images_per_second"),
        "speed_ratio": statistics.median(ours / plain for ours, plain in speeds),
    }


def extract_once(*, data: str, backbone: str, batch_size: int, workers: int) -> dict[str, float]:
    """Extract a folder with an empty cache as the device program does, and once more as after a restart."""
    from edge_client.data.extraction import extract
    from edge_client.data.images import find_images
    from edge_client.runtime.backbone import open_backbone
    from edge_client.storage.feature_cache import FeatureCache

    opened = open_backbone(Path(backbone))
    with tempfile.TemporaryDirectory() as state:

        def run() -> float:
            started = time.perf_counter()
            images = find_images(Path(data), CLASSES)
            cache = FeatureCache(Path(state) / "features.sqlite")
            extraction = extract(
                images,
                [opened.sha256],
                cache,
                open_backbone=lambda _: opened,
                batch_size=batch_size,
                workers=workers,
                on_progress=lambda _cached, _computed: None,
                should_stop=lambda: False,
            )
            cache.close()
            return (extraction.computed or extraction.cached) / (time.perf_counter() - started)

        speed = run()
        peak = peak_memory_bytes()
        images = len(find_images(Path(data), CLASSES))
        return {"images_per_second": speed, "memory_bytes": peak, "restart_seconds": images / run()}


def loop_once(*, data: str, backbone: str, batch_size: int, workers: int) -> dict[str, float]:
    """Do the same without threads or cache, in a session of ONNX Runtime's own defaults."""
    del workers
    import onnxruntime

    from edge_client.data.images import decode, find_images
    from protocol.models.onnx_metadata import BackboneMetadata, read_metadata
    from protocol.models.preprocessing import preprocess

    session = onnxruntime.InferenceSession(backbone, providers=["CPUExecutionProvider"])
    spec = read_metadata(session.get_modelmeta().custom_metadata_map, BackboneMetadata).preprocessing
    started = time.perf_counter()
    images = find_images(Path(data), CLASSES)
    for start in range(0, len(images), batch_size):
        batch = [preprocess(decode(image.path), spec) for image in images[start : start + batch_size]]
        session.run(["feature"], {"image": np.stack(batch)})
    return {"images_per_second": len(images) / (time.perf_counter() - started)}


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


def peak_memory_bytes() -> int:
    """Return this process's peak memory; Linux only. `getrusage` would include that of the parent process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _call(function: str, **arguments: Any) -> str:
    return f"import json\nfrom benchmarks.cost.device import {function}\nprint(json.dumps({function}(**{arguments!r})))"


if __name__ == "__main__":
    device()
