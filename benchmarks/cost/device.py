"""Cost of the device program: import time, memory over many images, and images per second.

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
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.report import json_option, print_figures, write_json

BARE = "import numpy, onnxruntime, paho.mqtt.client, PIL.Image"
PROGRAM = "import edge_client.cli, edge_client.service.device, onnxruntime"
"""Everything that a running device imports; the command line alone imports most of it later."""

CLASSES = ("china", "flower")
Runs = dict[str, list[dict[str, float]]]
"""Figures of each process, by measurement."""
REPORT = """
import time
started = time.perf_counter()
{imports}
seconds = time.perf_counter() - started
memory = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS:"))
print('{{"seconds": %f, "memory_bytes": %d}}' % (seconds, int(memory) * 1024))
"""


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
    """Measure the device program: imports, memory over many images, speed beside a plain loop."""
    runs: Runs = {}
    figures = measure_imports(repetitions, runs)
    with tempfile.TemporaryDirectory() as folder:
        few, many = Path(folder) / "few", Path(folder) / "many"
        write_photographs(many, count=images[1])
        link_some(many, few, count=images[0])
        run = {"backbone": str(backbone.resolve()), "batch_size": batch_size, "workers": workers}
        figures |= measure_memory(few, many, run, repetitions, runs)
        figures |= measure_speed(few, run, repetitions, runs)
    write_json(json_file, "device", figures=figures, runs=runs)
    print_figures(figures)


def measure_imports(repetitions: int, runs: Runs) -> dict[str, float]:
    """Return medians of import time and memory of the device program, also as multiples of its libraries' alone."""
    bare, program = runs["import_libraries"], runs["import_program"] = [], []
    for _ in range(repetitions):
        bare.append(_python(REPORT.format(imports=BARE)))
        program.append(_python(REPORT.format(imports=PROGRAM)))
    return {
        "import_seconds": _median(program, "seconds"),
        "import_time_ratio": _median(program, "seconds") / _median(bare, "seconds"),
        "import_memory_mb": _median(program, "memory_bytes") / 1e6,
        "import_memory_ratio": _median(program, "memory_bytes") / _median(bare, "memory_bytes"),
    }


def measure_memory(
    few: Path, many: Path, run: dict[str, Any], repetitions: int, runs: Runs
) -> dict[str, float]:
    """Return medians of the peak memory of extracting few and many images, each time with an empty cache."""
    peaks: dict[Path, list[dict[str, float]]] = {few: [], many: []}
    runs["extract_few"], runs["extract_many"] = peaks[few], peaks[many]
    for _ in range(repetitions):
        for data in (few, many):
            peaks[data].append(_python(_call("extract_once", data=str(data), **run)))
    return {
        "memory_few_mb": _median(peaks[few], "memory_bytes") / 1e6,
        "memory_many_mb": _median(peaks[many], "memory_bytes") / 1e6,
        "memory_ratio": _median(peaks[many], "memory_bytes") / _median(peaks[few], "memory_bytes"),
        "restart_seconds": _median(peaks[many], "restart_seconds"),
    }


def measure_speed(data: Path, run: dict[str, Any], repetitions: int, runs: Runs) -> dict[str, float]:
    """Return medians of images a second, and of a loop that decodes a batch and runs it, in one thread of Python."""
    ours, plain = runs["speed"], runs["loop_speed"] = [], []
    for _ in range(repetitions):
        ours.append(_python(_call("extract_once", data=str(data), **run)))
        plain.append(_python(_call("loop_once", data=str(data), **run)))
    return {
        "images_per_second": _median(ours, "images_per_second"),
        "loop_images_per_second": _median(plain, "images_per_second"),
        "speed_ratio": statistics.median(
            a["images_per_second"] / b["images_per_second"] for a, b in zip(ours, plain, strict=True)
        ),
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
                on_progress=lambda _done, _total: None,
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
    from protocol.onnx_metadata import BackboneMetadata, read_metadata
    from protocol.preprocessing import preprocess

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


def _python(program: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _median(figures: list[dict[str, float]], name: str) -> float:
    return statistics.median(entry[name] for entry in figures)


if __name__ == "__main__":
    device()
