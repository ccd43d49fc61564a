"""Features of a folder of photographs: the device program, beside PyTorch and a plain loop of ONNX Runtime.

`device features` runs whole programs in turns, over few and over many photographs: the difference is the rate without
the start. `torch.compile` takes longer than the difference, so that program prints its rate itself. One program only
runs the network, on arrays in memory. On a busy machine only processor times are of use. Weights are random, for time
does not depend on them.
"""

import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.device.measurement import Command, Cost, in_turns, median, ratio
from benchmarks.device.preparation import LABELED, export_random, link_some, train_head, write_photographs
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json

OURS = "edge-client --dry-run"
ARRAYS, COMPILED = "ONNX Runtime, arrays in memory", "PyTorch, torch.compile"
MODELS = ("mobilenetv3_small_100", "resnet18", "resnet50", "vit_tiny_patch16_224")

COLUMNS = {
    "program": "<30", "seconds": ">9.1f", "CPU s": ">8.1f", "peak MB": ">9.0f", "images/s": ">10.1f",
    "CPU ms an image": ">17.2f", "seconds, times ours": ">21.2f", "rate, ours to this": ">20.2f",
}  # fmt: skip


@click.command("features")
@repeated("--model", "models", default=MODELS, help="Of timm; may be repeated.")
@click.option("--image-size", type=click.IntRange(min=32), default=224, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--images", nargs=2, type=int, default=(100, 1000), show_default=True, help="Few, and many.")
@click.option("--repetitions", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--compiled", is_flag=True, help="Also with torch.compile, which takes minutes.")
@json_option
def command(
    *,
    models: tuple[str, ...],
    image_size: int,
    threads: int,
    images: tuple[int, int],
    repetitions: int,
    compiled: bool,
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
            table = Table(
                COLUMNS,
                title=f"{model} at {image_size}x{image_size}, {many:,} photographs, threads: {threads}",
            )
            backbone = export_random(model, image_size=image_size, folder=folder)
            train_head(folder / model, backbone, folder / "labeled")
            runs = {
                number: in_turns(
                    _programs(
                        model,
                        image_size,
                        threads,
                        backbone,
                        folder / model,
                        folder / str(number),
                        number,
                        compiled=compiled and number == many,
                    ),
                    repetitions=repetitions,
                    warm_up=number == few,
                )
                for number in images
            }
            for row in _rows(runs):
                table.row(*row)
            tables.append(table)
            every[model] = {
                str(number): {name: [asdict(one) for one in each] for name, each in programs.items()}
                for number, programs in runs.items()
            }
    write_json(json_file, "features", tables=tables, images=images, runs=every)


def _rows(runs: Mapping[int, Mapping[str, list[Cost]]]) -> list[tuple[object, ...]]:
    (few, short), (many, long) = runs.items()
    rates = {
        name: (many - few) / (median(long[name], "wall_s") - median(each, "wall_s"))
        for name, each in short.items()
    }
    cpu_ms = {
        name: 1e3 * (median(long[name], "cpu_s") - median(each, "cpu_s")) / (many - few)
        for name, each in short.items()
    }
    if COMPILED in long:
        rates[COMPILED] = statistics.median(float(cost.printed) for cost in long[COMPILED])
    return [
        (
            name,
            *(_whole(each) if name != ARRAYS else (None,) * 3),
            rates[name],
            cpu_ms.get(name),
            ratio(each, long[OURS], "wall_s") if name != ARRAYS else None,
            rates[OURS] / rates[name],
        )
        for name, each in long.items()
    ]


def _whole(runs: list[Cost]) -> tuple[float, ...]:
    return median(runs, "wall_s"), median(runs, "cpu_s"), median(runs, "memory_bytes") / 1e6


def _programs(
    model: str,
    image_size: int,
    threads: int,
    backbone: Path,
    fleet: Path,
    photographs: Path,
    images: int,
    *,
    compiled: bool,
) -> dict[str, Callable[[], Command]]:
    state, output = fleet / "state", fleet / "features.npy"

    def ours() -> Command:
        shutil.rmtree(state, ignore_errors=True)
        shutil.copytree(fleet / "device", state)
        options = ("--data", str(photographs), "--state", str(state), "--threads", str(threads))
        return ["-m", "edge_client.cli", "--dry-run", *options]

    def torch(mode: str) -> Command:
        program = ["-m", "benchmarks.device.rivals.torch_program", model, str(image_size), str(threads)]
        return [*program, mode, str(photographs), str(output)]

    def onnx(mode: str, *arguments: str) -> Command:
        program = ["-m", "benchmarks.device.rivals.onnx_program", str(backbone), str(threads)]
        return [*program, mode, *arguments]

    rivals: dict[str, Callable[[], Command]] = {
        ARRAYS: lambda: onnx("arrays", str(images)),
        "ONNX Runtime, a loop": lambda: onnx("features", str(photographs), str(output)),
        "PyTorch, DataLoader": lambda: torch("features"),
    }
    if compiled:
        rivals[COMPILED] = lambda: torch("compiled")
    return {OURS: ours, **rivals}
