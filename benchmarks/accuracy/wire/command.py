"""`python -m benchmarks accuracy wire`: bytes and accuracy of every algorithm and of what else devices could send."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from benchmarks.accuracy.wire.methods import (
    CLIENTS,
    FLOWER_DATA,
    METHODS,
    PARTITION,
    Fleet,
    Point,
    flower_bytes,
)
from benchmarks.data.features import backbone_file, load_features, prepared
from benchmarks.data.images import NAMES
from benchmarks.options import Option, repeated, resume_option, selected
from benchmarks.report import Plot, Table, commit, json_option, write_json
from protofleet.simulation.fleet import Features

BACKBONE, IMAGE_SIZE = "mobilenetv2_100", 96
IMAGE_SIZES = {"pacs": 224}
"""Of data sets of larger images than IMAGE_SIZE."""

DATA = (*NAMES, *IMAGE_SIZES)
Method = Callable[[Fleet], Iterator[Point]]


@dataclass(frozen=True, kw_only=True)
class Run(Point):
    """A point of one seed."""

    method: str
    seed: int
    commit: str = ""
    """Of the code that ran."""


def wire_options(methods: Mapping[str, Method]) -> Option:
    """Return a decorator with the options of a comparison of these methods."""
    options = (
        click.option("--data", type=click.Choice(DATA), default="fashion_mnist", show_default=True),
        click.option(
            "--images", type=click.IntRange(min=1), help="Training images of all devices.  [default: all]"
        ),
        selected("--method", "names", choices=methods),
        repeated(
            "--seed", "seeds", type=int, default=(0, 1, 2), help="Of the devices' images; may be repeated."
        ),
        resume_option,
        json_option,
    )
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(options), command)


@click.command("wire")
@wire_options(METHODS)
def command(**options: Any) -> None:
    """Measure the bytes that devices upload and the accuracy that this gives, of every algorithm."""
    measure(METHODS, **options)


def measure(
    methods: Mapping[str, Method],
    *,
    data: str,
    images: int | None,
    names: tuple[str, ...],
    seeds: tuple[int, ...],
    resume: Path | None,
    json_file: Path | None,
) -> None:
    """Run the named methods, and write the means over seeds of all runs."""
    load = loaded(data)
    table = Table(_COLUMNS)
    stored = json.loads(resume.read_text(encoding="utf-8"))["runs"] if resume else []
    runs = msgspec.convert(stored, list[Run])
    done = {(run.method, run.seed) for run in runs}
    for seed in seeds:
        fleet = fleet_of(data, load, images, seed)
        for name in (name for name in names if (name, seed) not in done):
            for point in methods[name](fleet):
                runs.append(Run(**asdict(point), method=name, seed=seed, commit=commit()))
                megabytes = point.bytes_up / 1e6
                table.row(name, point.setting, point.uploads, f"{seed}", point.accuracy, None, megabytes)
            _store(json_file, data, runs, [table])
    _store(json_file, data, runs, _tables(runs, data, images))


_COLUMNS = {
    "method": "<40", "setting": "<24", "uploads": ">8", "seeds": ">8", "top-1": ">8.2%", "front": ">6",
    "MB up": ">9.2f",
}  # fmt: skip


def loaded(data: str, *, validation: int | None = None) -> Callable[[str], Features]:
    """Return a function that loads the features of layers.

    With `validation`, training images that this seed chooses take the place of the test images.
    """

    @lru_cache(maxsize=3)
    def load(layers: str) -> Features:
        backbone = f"{BACKBONE}:{layers}" if layers else BACKBONE
        features = load_features(data, backbone=backbone, image_size=IMAGE_SIZES.get(data, IMAGE_SIZE))
        held_out = validation is not None
        return prepared(features, root=False, validation=held_out, seed=validation or 0)

    return load


def fleet_of(data: str, load: Callable[[str], Features], images: int | None, seed: int) -> Fleet:
    """Return the devices of a seed, those of `benchmarks flower` for seed 0 and as many images."""

    @lru_cache(maxsize=3)
    def of_layers(layers: str) -> Features:
        loaded = load(layers)
        rows = np.sort(np.random.default_rng(seed).permutation(len(loaded.train))[:images])
        return replace(loaded, train=loaded.train[rows], train_labels=loaded.train_labels[rows])

    return Fleet(data=data, seed=seed, load=of_layers)


def means_of(runs: Collection[Run]) -> list[tuple[Run, int]]:
    """Return the means of all points over their seeds, with the numbers of seeds, those with the fewest bytes first."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.method, run.setting), []).append(run)
    means = []
    for each in groups.values():
        accuracy, bytes_up = np.mean([(run.accuracy, run.bytes_up) for run in each], axis=0).tolist()
        means.append((replace(each[0], accuracy=accuracy, bytes_up=bytes_up), len(each)))
    return sorted(means, key=lambda mean: mean[0].bytes_up)


def front(points: Sequence[Point]) -> list[bool]:
    """Return for each point, in the order of bytes, whether none with as few bytes or fewer is as accurate."""
    best, on_front = 0.0, []
    for point in points:
        on_front.append(point.accuracy > best)
        best = max(best, point.accuracy)
    return on_front


_ORDER = {name: number for number, name in enumerate(METHODS)}


def _store(file: Path | None, data: str, runs: Collection[Run], tables: Sequence[Table]) -> None:
    means = [mean for mean, _ in means_of(runs)]
    lines: dict[str, list[tuple[float, float]]] = {}
    for mean in sorted(means, key=lambda mean: _ORDER.get(mean.method, len(_ORDER))):
        lines.setdefault(mean.method, []).append((mean.bytes_up / 1e6, 100 * mean.accuracy))
    plot = Plot(
        title=f"Bytes up and accuracy, {data}",
        x="MB up, all ten devices and all rounds",
        y="test accuracy, %",
        series=lines,
        log=("x",),
    )
    write_json(
        file,
        "wire",
        tables=tables,
        plots=[plot],
        data=data,
        backbone=BACKBONE,
        runs=[asdict(run) for run in runs],
    )


def _tables(runs: Collection[Run], data: str, images: int | None) -> list[Table]:
    """Print the means of all points, and what others send beside the data set that was measured with Flower."""
    means = means_of(runs)
    number = f"{images:,}" if images else "all"
    table = Table(_COLUMNS, title=f"{data}, {number} training images, {CLIENTS} devices, {PARTITION}")
    for (mean, seeds), is_best in zip(means, front([mean for mean, _ in means]), strict=True):
        on_front, megabytes = "*" if is_best else None, mean.bytes_up / 1e6
        table.row(mean.method, mean.setting, mean.uploads, f"{seeds}", mean.accuracy, on_front, megabytes)
    if data != FLOWER_DATA:
        return [table]
    others = Table(
        {"what": "<60", "devices": ">8", "top-1": ">8.2%", "MB up": ">10.2f"}, title="What others send"
    )
    model = backbone_file(BACKBONE, image_size=IMAGE_SIZE).stat().st_size
    others.row(f"the model, {BACKBONE} in float32, one round", CLIENTS, None, CLIENTS * model / 1e6)
    others.row("adapter and head, one round, measured with Flower", CLIENTS, None, flower_bytes() / 1e6)
    for what, devices, accuracy, values in PRINTED:
        others.row(what, devices, accuracy, FLOAT32 * values / 1e6)
    return [table, others]


FLOAT32 = 4
PRINTED: Sequence[tuple[str, int, float | None, float]] = (
    ("FedTC's paper: CIFAR-10, Dirichlet 0.1, ResNet-50", 10, 0.8469, 8.75e6),
    ("FedTC's paper: the same model itself, one round", 10, None, 380.48e6),
    ("FedPCL's paper: Digit-5, one backbone, one round", 5, 0.5283, 5 * 2560),
    ("FedPCL's paper: FedAvg, one round", 5, 0.4404, 5 * 395_776),
)
"""Figures of papers: devices, top-1 accuracy after all rounds, and values of float32 that all devices send."""
