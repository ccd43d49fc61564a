"""Features of a folder of photographs: the device program, beside PyTorch and a plain loop of ONNX Runtime.

`device features` runs whole programs in turns, over few and over many photographs: the difference is the rate without
the start. `torch.compile` takes longer than the difference, so that program prints its rate itself. One program only
runs the network, on arrays in memory. On a busy machine only processor times are of use. Weights are random, for time
does not depend on them.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.device.measurement import (
    LABELED,
    THREADS,
    Command,
    Cost,
    export_random,
    in_turns,
    link_some,
    median,
    ratio,
    train_head,
    write_photographs,
)
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json

OURS = "edge-client dry-run"
ARRAYS = "ONNX Runtime, arrays in memory"
MODELS = ("mobilenetv3_small_100", "resnet18", "resnet50", "vit_tiny_patch16_224")

COLUMNS = {
    "program": "<30", "seconds": ">9.1f", "CPU s": ">8.1f", "peak MB": ">9.0f", "images/s": ">10.1f",
    "CPU ms an image": ">17.2f", "seconds, times ours": ">21.2f", "rate, ours to this": ">20.2f",
}  # fmt: skip


@click.command("features")
@repeated("--model", "models", default=MODELS, help="Of timm; may be repeated.")
@click.option("--image-size", type=click.IntRange(min=32), default=224, show_default=True)
@click.option("--images", nargs=2, type=int, default=(100, 1000), show_default=True, help="Few, and many.")
@click.option("--repetitions", type=click.IntRange(min=1), default=3, show_default=True)
@json_option
def command(
    *,
    models: tuple[str, ...],
    image_size: int,
    images: tuple[int, int],
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Compare the device program's features of photographs with PyTorch's and a plain loop's."""
    tables, every = [], {}
    few, many = images
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photographs(folder / str(many), count=many)
        link_some(folder / str(many), folder / str(few), count=few)
        link_some(folder / str(many), folder / "labeled", count=LABELED)
        for model in models:
            title = f"{model} at {image_size}x{image_size}, {many:,} photographs, threads: {THREADS}"
            table = Table(COLUMNS, title=title)
            backbone = export_random(model, image_size=image_size, folder=folder)
            fleet = folder / model
            train_head(fleet, backbone, folder / "labeled")
            torch = (model, str(image_size), str(THREADS), "features")
            runs = {}
            for number in images:
                programs = _programs(fleet, folder / str(number), number, backbone, torch)
                runs[number] = in_turns(programs, repetitions=repetitions, warm_up=number == few)
            for row in _rows(runs):
                table.row(*row)
            tables.append(table)
            every[model] = {
                str(number): {name: [asdict(one) for one in each] for name, each in costs.items()}
                for number, costs in runs.items()
            }
    write_json(json_file, "features", tables=tables, images=images, runs=every)


def _rows(runs: Mapping[int, Mapping[str, list[Cost]]]) -> Iterator[tuple[object, ...]]:
    (few, short), (many, long) = runs.items()

    def per_image(name: str, figure: str) -> float:
        return (median(long[name], figure) - median(short[name], figure)) / (many - few)

    for name, each in long.items():
        whole: tuple[float | None, ...] = (None,) * 3
        times = None
        if name != ARRAYS:
            whole = median(each, "wall_s"), median(each, "cpu_s"), median(each, "memory_bytes") / 1e6
            times = ratio(each, long[OURS], "wall_s")
        seconds = per_image(name, "wall_s")
        cpu_ms = 1e3 * per_image(name, "cpu_s")
        yield name, *whole, 1 / seconds, cpu_ms, times, seconds / per_image(OURS, "wall_s")


def _programs(
    fleet: Path, photographs: Path, images: int, backbone: Path, torch: Command
) -> dict[str, Callable[[], Command]]:
    state, output = fleet / "state", str(fleet / "features.npy")
    rivals, onnx = "benchmarks.device.rivals", (str(backbone), str(THREADS))

    def ours() -> Command:
        shutil.rmtree(state, ignore_errors=True)
        shutil.copytree(fleet / "device", state)
        options = ("--data", str(photographs), "--state", str(state), "--threads", str(THREADS))
        return ["-m", "edge_client.cli", "dry-run", *options]

    return {
        OURS: ours,
        ARRAYS: lambda: ["-m", f"{rivals}.onnx_program", *onnx, "arrays", str(images)],
        "ONNX Runtime, a loop": lambda: [
            *("-m", f"{rivals}.onnx_program", *onnx, "features", str(photographs), output)
        ],
        "PyTorch, DataLoader": lambda: ["-m", f"{rivals}.torch_program", *torch, str(photographs), output],
    }
