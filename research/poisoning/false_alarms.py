"""`python -m research false-alarms`: fleets of honest devices of which outlier detection quarantines one."""

import dataclasses
from pathlib import Path
from typing import Literal

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.config.schema import Robust
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.outlier_detection import judge
from aggregator.training.robust.outlier_statistics import summaries
from aggregator.training.robust.training_set import pool
from benchmarks.data.features import BackboneType, load_features
from benchmarks.data.images import DIGITS, NAMES
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json

GAUSSIAN = "gaussian"
BATCH = 5
DIMENSIONS = 64
"""Dimensions of Gaussian features, whose k-th deviation is k^-0.75, and coordinates of real ones that are used."""
MAX_ROWS = 40_000
"""Prototypes of a fleet above which only one class is used."""

Places = Literal["one", "several", "line"]
PLACES: dict[Places, int] = {"one": 0, "several": 5, "line": 1}
"""Directions in which the means of devices differ, each by the same variance."""

PLACE_VARIANCE = 0.05
"""Variance of the mean of a device's class, over that of an image."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Fleets of one kind."""

    data: str
    places: Places
    uneven: bool
    devices: int
    images: int
    fleets: int
    alarms: int
    """Fleets with a quarantined device."""


@click.command("false-alarms")
@repeated(
    "--data",
    "sources",
    type=click.Choice([GAUSSIAN, *dict.fromkeys((*NAMES, *DIGITS))]),
    default=(GAUSSIAN,),
)
@click.option("--backbone", type=BackboneType(), default="mobilenetv2_100", show_default=True)
@click.option("--image-size", type=click.IntRange(min=32), default=96, show_default=True)
@click.option("--at-most", type=click.IntRange(min=1), help="Images of the data set that are used.")
@repeated("--devices", type=click.IntRange(min=1), default=(5, 8, 20, 100, 1000))
@repeated(
    "--images", type=click.IntRange(min=2), default=(10, 20, 100, 1000), help="Of each class on each device."
)
@repeated("--places", type=click.Choice(list(PLACES)), default=("one", "several"))
@click.option("--uneven", is_flag=True, help="Devices have from a quarter to four times the images.")
@click.option("--classes", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--fleets", type=click.IntRange(min=1), default=500, show_default=True)
@click.option(
    "--false-alarm-rate",
    type=click.FloatRange(0, 0.5, min_open=True),
    default=Robust().false_alarm_rate,
    show_default=True,
)
@json_option
def command(
    *,
    sources: tuple[str, ...],
    backbone: str,
    image_size: int,
    at_most: int | None,
    devices: tuple[int, ...],
    images: tuple[int, ...],
    places: tuple[Places, ...],
    uneven: bool,
    classes: int,
    fleets: int,
    false_alarm_rate: float,
    json_file: Path | None,
) -> None:
    """Count fleets of honest devices with a quarantined one. Devices draw images with replacement."""
    results: list[Result] = []
    for data in sources:
        drawn = (
            None
            if data == GAUSSIAN
            else _of_classes(data, classes, backbone=backbone, image_size=image_size, at_most=at_most)
        )
        for where in places:
            headings = {f"{count} images": ">14" for count in images}
            title = f"{data}, places: {where}, quarantined an honest device"
            table = Table({"devices": ">7", **headings}, title=title)
            for number in devices:
                row = [
                    measure(
                        *(data, where, number, count),
                        classes=classes,
                        fleets=fleets,
                        uneven=uneven,
                        false_alarm_rate=false_alarm_rate,
                        drawn=drawn,
                    )
                    for count in images
                ]
                results += row
                table.row(number, *(f"{one.alarms} of {one.fleets}" for one in row))
    every = [dataclasses.asdict(one) for one in results]
    write_json(json_file, "false-alarms", rate=false_alarm_rate, runs=every)


def measure(
    data: str,
    places: Places,
    devices: int,
    images: int,
    *,
    classes: int,
    fleets: int,
    uneven: bool,
    false_alarm_rate: float,
    drawn: list[NDArray[np.float32]] | None,
) -> Result:
    """Judge fleets of one kind: fewer of large ones, and of one class."""
    if devices * classes * images / BATCH > MAX_ROWS:
        classes = 1
    fleets = max(1, min(fleets, round(fleets * 100 / (devices * max(images / 100, 1)))))
    names, alarms = [str(label) for label in range(classes)], 0
    for seed in range(fleets):
        random = np.random.default_rng([seed, devices, images])
        parts = honest_fleet(
            *(random, devices, images), classes=classes, places=places, uneven=uneven, drawn=drawn
        )
        judgment = judge(summaries(parts), classes=names, false_alarm_rate=false_alarm_rate)
        alarms += bool(judgment.quarantined)
    return Result(
        data=data,
        places=places,
        uneven=uneven,
        devices=devices,
        images=images,
        fleets=fleets,
        alarms=alarms,
    )


def honest_fleet(
    random: np.random.Generator,
    devices: int,
    images: int,
    *,
    classes: int,
    places: Places = "one",
    uneven: bool = False,
    drawn: list[NDArray[np.float32]] | None = None,
) -> dict[str, Prototypes]:
    """Return the prototypes of devices with so many images of each class, Gaussian features or drawn from real ones."""
    size = DIMENSIONS if drawn is None else drawn[0].shape[1]
    centers = 3 * random.normal(size=(classes, size)) / np.sqrt(size)
    deviations = np.arange(1, size + 1) ** -0.75
    deviations /= np.linalg.norm(deviations)
    spread = 1.0 if drawn is None else float(np.mean([each.var(axis=0).sum() for each in drawn]))
    directions = random.normal(size=(PLACES[places], size)) / np.sqrt(size)
    fleet = {}
    for device in range(devices):
        made = []
        for label in range(classes):
            count = round(images * 4 ** random.uniform(-1, 1)) if uneven else images
            place = np.sqrt(PLACE_VARIANCE * spread / max(len(directions), 1)) * random.normal(
                size=len(directions)
            )
            rows, each = max(count // BATCH, 1), min(count, BATCH)
            if drawn is None:
                values = centers[label] + deviations * random.normal(size=(rows, size)) / np.sqrt(each)
            else:
                chosen = random.choice(drawn[label], rows * each).astype(np.float64)
                values = chosen.reshape(rows, each, size).mean(axis=1)
            values = (values + place @ directions).astype(np.float32)
            made.append(Prototypes(values, np.full(rows, label), np.full(rows, each)))
        fleet[f"device-{device:04}"] = pool(made)
    return fleet


def _of_classes(
    data: str, classes: int, *, backbone: str, image_size: int, at_most: int | None
) -> list[NDArray[np.float32]]:
    """Return some coordinates of the features of each class."""
    features = load_features(data, backbone=backbone, image_size=image_size, at_most=at_most)
    some = features.train[:, :: max(1, features.train.shape[1] // DIMENSIONS)]
    return [some[features.train_labels == label] for label in range(classes)]
