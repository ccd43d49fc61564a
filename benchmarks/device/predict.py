"""Predictions of photographs: the device program, beside PyTorch and ONNX Runtime alone.

`device predict` runs whole programs in turns, over one photograph and over many: the difference is the time of a later
photograph.
"""

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.device.measurement import (
    LABELED,
    THREADS,
    Command,
    export_random,
    in_turns,
    median,
    ratio,
    train_head,
    write_photographs,
)
from benchmarks.report import Table, json_option, write_json

OURS = "edge-client predict"
COLUMNS = {
    "program": "<22", "first, s": ">10.2f", "CPU s": ">8.2f", "peak MB": ">9.0f", "later, ms": ">11.1f",
    "first, times ours": ">19.2f", "later, times ours": ">19.2f",
}  # fmt: skip


@click.command("predict")
@click.option(
    "--model", default="mobilenetv3_small_100", show_default=True, help="Of timm, with random weights."
)
@click.option("--image-size", type=click.IntRange(min=32), default=224, show_default=True)
@click.option("--images", type=click.IntRange(min=2), default=200, show_default=True)
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True)
@json_option
def command(*, model: str, image_size: int, images: int, repetitions: int, json_file: Path | None) -> None:
    """Compare the device program's predictions with PyTorch's and with ONNX Runtime's alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photographs(folder / "images", count=images)
        photographs = sorted(map(str, (folder / "images").glob("*/*.jpg")))
        write_photographs(folder / "labeled", count=LABELED)
        fleet = folder / "fleet"
        train_head(fleet, export_random(model, image_size=image_size, folder=folder), folder / "labeled")
        fused = fleet / "aggregator" / "model.onnx"

        def programs(paths: list[str]) -> dict[str, Callable[[], Command]]:
            state = ("--state", str(fleet / "device"), "--threads", str(THREADS))
            return {
                OURS: lambda: ["-m", "edge_client.cli", "predict", *state, *paths],
                "ONNX Runtime": lambda: [
                    *("-m", "benchmarks.device.rivals.onnx_program", str(fused)),
                    *(str(THREADS), "predict", *paths),
                ],
                "PyTorch and timm": lambda: [
                    *("-m", "benchmarks.device.rivals.torch_program", model, str(image_size)),
                    *(str(THREADS), "predict", *paths),
                ],
            }

        first = in_turns(programs(photographs[:1]), repetitions=repetitions)
        many = in_turns(programs(photographs), repetitions=repetitions)
    later = {
        name: (median(many[name], "wall_s") - median(first[name], "wall_s")) / (images - 1) for name in first
    }
    table = Table(
        COLUMNS, title=f"{model} at {image_size}x{image_size}, {images} photographs, threads: {THREADS}"
    )
    for program, each in first.items():
        costs = median(each, "wall_s"), median(each, "cpu_s"), median(each, "memory_bytes") / 1e6
        times = ratio(each, first[OURS], "wall_s"), later[program] / later[OURS]
        table.row(program, *costs, 1000 * later[program], *times)
    runs = {
        number: {program: [asdict(one) for one in each] for program, each in costs.items()}
        for number, costs in (("1", first), (str(images), many))
    }
    write_json(json_file, "predict", tables=[table], runs=runs)
