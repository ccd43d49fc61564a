"""`python -m benchmarks cost train`: the aggregator's training of a head beside the paper's recipe in plain PyTorch."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES, Recipe, recipe_of
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.training.robust.training_set import combine
from benchmarks.data.features import load_features
from benchmarks.data.images import NAMES
from benchmarks.fleets import Settings, fleet_prototypes
from benchmarks.options import selected
from benchmarks.report import Table, json_option, write_json
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition

BACKBONE, IMAGE_SIZE = "mobilenetv2_100", 96
PARTITION = Partition("dirichlet", 0.1)
PAPER = RECIPES["paper"]
TURNS = 4
"""Parts of the paper's recipe, between which ours are trained in turn."""

DEFAULT = "default"
OURS: Mapping[str, Recipe] = {
    "epochs = 1": recipe_of(Training(epochs=1)),
    "epochs = 2": recipe_of(Training(epochs=2)),
    DEFAULT: recipe_of(Training()),
}
"""Settings of a task file's `[training]`."""

COLUMNS = {
    "data": "<14", "training": "<24", "accuracy": ">9.2%", "seconds": ">9.2f", "CPU s": ">9.2f",
    "until the recipe's accuracy, s": ">31.2f", "CPU, s": ">8.2f", "times sooner": ">13.1f", "by CPU": ">8.1f",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head, and what it took since the prototypes were there."""

    accuracy: float
    """On the test images."""
    wall_s: float
    cpu_s: float


@click.command("train")
@selected("--data", "names", choices=NAMES)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=PAPER.epochs,
    show_default=True,
    help="Of the paper's recipe.",
)
@click.option("--turns", type=click.IntRange(min=1), default=TURNS, show_default=True, help="Of ours.")
@json_option
def command(*, names: tuple[str, ...], epochs: int, turns: int, json_file: Path | None) -> None:
    """Time the aggregator's training against the paper's recipe in plain PyTorch, on the same prototypes."""
    setting = f"{PARTITION}, B 5, {BACKBONE} at {IMAGE_SIZE}x{IMAGE_SIZE}, {torch.get_num_threads()} threads"
    table, runs = Table(COLUMNS, title=setting), []
    for name in names:
        recipe, ours = _compare(name, epochs=epochs, turns=turns)
        _show(table, name, recipe, ours)
        heads = {title: list(map(asdict, each)) for title, each in ours.items()}
        runs.append({"data": name, "recipe": list(map(asdict, recipe)), "ours": heads})
    write_json(json_file, "train", tables=[table], epochs=epochs, runs=runs)


def _compare(name: str, *, epochs: int, turns: int) -> tuple[list[Head], dict[str, list[Head]]]:
    """Return the head after each epoch of the paper's recipe, and the finished heads of our turns."""
    features = load_features(name, backbone=BACKBONE, image_size=IMAGE_SIZE)
    parts = fleet_prototypes(features, PARTITION, Settings(prototypes="batches"), seed=0)
    data = combine(list(parts.values()), num_classes=features.classes)
    plain, recipe = _plain(data, features), list[Head]()
    ours: dict[str, list[Head]] = {title: [] for title in OURS}
    for turn in range(turns):
        for title, settings_of in OURS.items():
            ours[title].append(_ours(data, features, settings_of))
        recipe += [next(plain) for _ in range(len(recipe), epochs * (turn + 1) // turns)]
    return recipe, ours


def reached(recipe: Sequence[Head]) -> Head:
    """Return the recipe's first head that is as accurate as its last one."""
    return next(head for head in recipe if head.accuracy >= recipe[-1].accuracy)


def _ours(data: TrainingSet, features: Features, recipe: Recipe) -> Head:
    """Train as the aggregator does: cross-validation, adapter or discriminant, temperature, compression."""
    started = time.perf_counter(), time.process_time()
    trained = train_head(data, recipe, seed=0, device="cpu")
    wall_s, cpu_s = time.perf_counter() - started[0], time.process_time() - started[1]
    predicted = logits_of(trained.layers, features.test).argmax(axis=1)
    return Head(accuracy=_share(predicted, features), wall_s=wall_s, cpu_s=cpu_s)


def _share(predicted: NDArray[np.int64], features: Features) -> float:
    return float((predicted == features.test_labels).mean())


def _plain(data: TrainingSet, features: Features) -> Iterator[Head]:
    """Yield the head of each epoch of the paper's recipe, as a PyTorch program of a few lines trains it."""
    torch.manual_seed(0)
    first, second, last = (
        nn.Linear(data.values.shape[1], 1024),
        nn.Linear(1024, 512),
        nn.Linear(512, features.classes),
    )
    parameters = [*first.parameters(), *second.parameters(), *last.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=PAPER.learning_rate)
    values, labels = torch.from_numpy(data.values), torch.from_numpy(data.labels)
    test = torch.from_numpy(features.test)

    def logits(rows: Tensor) -> Tensor:
        for layer in (first, second):
            rows = functional.normalize(functional.relu(layer(rows)))
        answer: Tensor = last(rows)
        return answer

    wall_s = cpu_s = 0.0
    while True:
        started = time.perf_counter(), time.process_time()
        for members in torch.split(torch.randperm(len(labels)), PAPER.batch_size):
            optimizer.zero_grad()
            loss = functional.cross_entropy(logits(values[members]), labels[members])
            torch.autograd.backward(loss)
            optimizer.step()
        wall_s, cpu_s = wall_s + time.perf_counter() - started[0], cpu_s + time.process_time() - started[1]
        with torch.inference_mode():
            predicted = logits(test).argmax(dim=1).numpy()
        yield Head(accuracy=_share(predicted, features), wall_s=wall_s, cpu_s=cpu_s)


def _show(table: Table, name: str, recipe: Sequence[Head], ours: Mapping[str, Sequence[Head]]) -> None:
    first, last = reached(recipe), recipe[-1]
    figures = (last.accuracy, last.wall_s, last.cpu_s, first.wall_s, first.cpu_s, 1.0, 1.0)
    table.row(name, f"the paper's, {len(recipe)} epochs", *figures)
    for title, heads in ours.items():
        accuracy = heads[0].accuracy
        wall_s, cpu_s = (
            float(np.median([getattr(head, figure) for head in heads])) for figure in ("wall_s", "cpu_s")
        )
        sooner: tuple[float | None, ...] = (None,) * 4
        if accuracy >= last.accuracy:
            sooner = (wall_s, cpu_s, first.wall_s / wall_s, first.cpu_s / cpu_s)
        table.row(name, f"ours, {title}", accuracy, wall_s, cpu_s, *sooner)
