"""A head of the prototypes of several devices: outliers quarantined, influence limited, then trained. Pure."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aggregator.algorithms.fedtc.arrays import Arrays
from aggregator.algorithms.fedtc.recipe import Recipe
from aggregator.algorithms.fedtc.train_head import TrainedHead, train_head
from aggregator.config.schema import Robust
from aggregator.ingest.validation import Prototypes
from aggregator.training.robust.outlier_detection import Judgment, judge
from aggregator.training.robust.outlier_statistics import summaries
from aggregator.training.robust.training_set import WeightedPrototypes, combine
from aggregator.training.robust.weights import Counting, counting, stated_images


@dataclass(frozen=True, kw_only=True)
class FleetHead:
    """A head, what it was trained on, and the devices whose prototypes were omitted."""

    trained: TrainedHead
    data: WeightedPrototypes
    judgment: Judgment
    counting: Counting
    seconds: float
    """Duration of the training."""


def train_fleet_head(  # noqa: PLR0913 - what a job says of a training
    parts: Mapping[str, Prototypes],
    *,
    classes: Sequence[str],
    widths: Sequence[int] = (),
    recipe: Recipe,
    robust: Robust,
    released: Collection[str] = (),
    seed: int,
    device: str,
    arrays: Arrays | None = None,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> FleetHead:
    """Train a head on the prototypes of each device, in the order of `parts`, as the aggregator does.

    `widths` are those of `train_head`. Devices in `released` are not quarantined. Arrays of all prototypes are made
    by `arrays`, in memory if it is None.
    `report` is called as by
    `train_head`, and before with the number of `prototypes`.

    Raises:
        ProtofleetError: the data cannot be trained on.
    """
    judgment = Judgment({})
    if robust.detect_outliers:
        judgment = judge(
            summaries(parts),
            classes=classes,
            false_alarm_rate=robust.false_alarm_rate,
            released=released,
        )
    used = {name: part for name, part in parts.items() if name not in judgment.quarantined}
    data = combine(
        list(used.values()),
        max_multiple=robust.max_multiple,
        disputed=judgment.disputed,
        arrays=arrays,
    )
    report({"prototypes": len(data.labels)})
    started_s = time.perf_counter()
    trained = train_head(
        data.values,
        data.labels,
        data.counts,
        weights=data.weights,
        common=data.common,
        devices=data.devices,
        num_classes=len(classes),
        widths=widths,
        recipe=recipe,
        seed=seed,
        device=device,
        arrays=arrays,
        report=report,
    )
    images = dict(zip(used, stated_images(list(used.values()), len(classes)), strict=True))
    return FleetHead(
        trained=trained,
        data=data,
        judgment=judgment,
        counting=counting(images, classes, multiple=robust.max_multiple),
        seconds=time.perf_counter() - started_s,
    )
