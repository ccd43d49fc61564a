"""`python -m research squares`: heads of a fleet in which one device labels images with a square as another class."""

import dataclasses
import itertools
from pathlib import Path
from typing import get_args

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.config.schema import Robust
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.training_set import judged_set
from benchmarks.accuracy.fedtc import partitions_option
from benchmarks.data.features import backbone_file, features_of
from benchmarks.data.images import Labeled, load_data, sample
from benchmarks.fleets import Settings, accuracy_of
from benchmarks.options import repeated, selected
from benchmarks.report import Table, json_option, write_json
from edge_client.graphs.backbone import open_backbone
from protofleet.simulation.fedtc import fleet_submissions
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition, share_out
from protofleet.submissions import decoded
from research.poisoning.data_options import DataOptions, data_options
from research.poisoning.prototypes import Form

RECIPE = dataclasses.replace(RECIPES["default"], adapter=False)
"""The default recipe chooses no adapter in fleets of this size."""

DEVICES = 10
SIDE = 1 / 8
"""Side of the square, of that of the image."""

SHARES = (0.1, 0.25, 0.5)
"""Images with a square, of those of the target class that the attacker has."""

EVALUATED = 500
"""Test images that get a square."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One fleet."""

    partition: str
    share: float
    """Images with a square, of those of the target class that the attacker has; 0 without an attack."""
    form: Form
    seed: int
    success: float
    """Share of the squared test images of other classes that are predicted as the target class."""
    accuracy: float
    """On test images without a square."""
    quarantined: bool


@click.command("squares")
@data_options(names=("fashion_mnist", "cifar10"), images=6_000)
@partitions_option("dirichlet:0.5")
@repeated("--share", "shares", type=click.FloatRange(0, min_open=True), default=SHARES)
@selected("--form", "forms", choices=get_args(Form))
@repeated("--seed", "seeds", type=int, default=(0, 1, 2))
@json_option
def command(
    *,
    source: DataOptions,
    partitions: list[Partition],
    shares: tuple[float, ...],
    forms: tuple[Form, ...],
    seeds: tuple[int, ...],
    json_file: Path | None,
) -> None:
    """Measure how many images with a square are predicted as the attacker's class, where one device of ten attacks.

    The last device gives images of other classes a white square, and the label of the class of which it has most.
    """
    features, images = source.load(), load_data(source.data)
    train, test = (sample(part, source.images) for part in (images.train, images.test))
    backbone = open_backbone(backbone_file(source.backbone, image_size=source.image_size))
    evaluated = np.random.default_rng(0).permutation(len(test.labels))[:EVALUATED]
    squared_test = features_of(with_square(test.images[evaluated]), backbone, "squared test images")
    columns = {"partition": "<15", "share": ">6g", "form": "<8", "success": ">9.1%", "accuracy": ">9.1%"}
    table = Table({**columns, "found": ">6"}, title=source.title(DEVICES))
    results: list[Result] = []
    for partition, seed in itertools.product(partitions, seeds):
        owners = share_out(features.train_labels, partition, clients=DEVICES, rng=np.random.default_rng(seed))
        rows, target = squared_rows(train, owners, most=max(shares), seed=seed)
        squared = features_of(with_square(train.images[rows]), backbone, "squared training images")
        of_target = int((train.labels[owners == DEVICES - 1] == target).sum())
        others = test.labels[evaluated] != target
        for form in forms:
            parts = uploads(features, owners, form, seed=seed)
            for share in (0.0, *shares):
                number = round(share * of_target)
                changed = poisoned_features(features, rows[:number], squared[:number], target)
                mine = np.where(owners == DEVICES - 1, owners, -1)
                sent = {**parts, **uploads(changed, mine, form, seed=seed)} if number else parts
                classes = [str(label) for label in range(features.classes)]
                data, judgment, _ = judged_set(sent, classes=classes, robust=Robust())
                layers = train_head(data, RECIPE, seed=seed, device="cpu").layers
                predicted = logits_of(layers, squared_test[others]).argmax(axis=1)
                results.append(
                    Result(
                        partition=str(partition),
                        share=share,
                        form=form,
                        seed=seed,
                        success=float((predicted == target).mean()),
                        accuracy=accuracy_of(layers, features),
                        quarantined=str(DEVICES - 1) in judgment.quarantined,
                    )
                )
    for name, share, form in itertools.product(map(str, partitions), (0.0, *shares), forms):
        runs = [one for one in results if (one.partition, one.share, one.form) == (name, share, form)]
        success, accuracy = (
            float(np.mean([getattr(one, name) for one in runs])) for name in ("success", "accuracy")
        )
        found = f"{sum(one.quarantined for one in runs)}/{len(runs)}"
        table.row(name, share, form, success, accuracy, found)
    write_json(json_file, "squares", data=source.data, runs=list(map(dataclasses.asdict, results)))


def with_square(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return images (n, H, W) or (n, H, W, 3) with a white square near the lower right corner."""
    side = round(SIDE * images.shape[1])
    changed = images.copy()
    changed[:, -side - 1 : -1, -side - 1 : -1] = 255
    return changed


def squared_rows(
    train: Labeled, owners: NDArray[np.int64], *, most: float, seed: int
) -> tuple[NDArray[np.intp], int]:
    """Return the images of the last device that get a square, and their false class, of which it has most images.

    They are `most` times as many as its images of that class, if it has as many others.
    """
    mine = np.flatnonzero(owners == DEVICES - 1)
    numbers = np.bincount(train.labels[mine])
    target = int(numbers.argmax())
    others = np.random.default_rng(seed).permutation(mine[train.labels[mine] != target])
    return others[: round(most * numbers[target])], target


def poisoned_features(
    features: Features, rows: NDArray[np.intp], squared: NDArray[np.float32], target: int
) -> Features:
    """Return features of which some training rows are those of images with a square, with a false class."""
    train, labels = features.train.copy(), features.train_labels.copy()
    train[rows], labels[rows] = squared, target
    return dataclasses.replace(features, train=train, train_labels=labels)


def uploads(features: Features, owners: NDArray[np.int64], form: Form, *, seed: int) -> dict[str, Prototypes]:
    """Return what the devices of some images (n,) upload; those of owner -1 are not used."""
    mine = owners >= 0
    used = dataclasses.replace(features, train=features.train[mine], train_labels=features.train_labels[mine])
    expectation = Settings(prototypes=form).expectation(features)
    payloads = fleet_submissions(used, owners[mine], expectation, seed=seed)
    return {device: decoded(payload, expectation) for device, payload in payloads.items()}
