"""Time of a device's local training, beside the same in eager torch and with torch.compile.

`research step` takes whole trainings of a round in turns within one process, since the machine may be busy: read the
ratios, not the milliseconds. A training is the device program's own, with all that is done before the first and after
the last step. Features are random, for time does not depend on them.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from aggregator.algorithms.algorithm import Contribution
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fpl import FPL
from aggregator.graphs.program_export import Graphs, build, untrained
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from edge_client.graphs.program_graph import open_graph
from edge_client.training.trainer import Checkpoint, Schedule, TrainingSet, train
from protofleet.simulation.rounds import HOOKS

FEATURES = 1280
"""Length of a feature of one MobileNetV2."""
CLASSES = 10
DEVICES = 5
SETTINGS: dict[str, FedPCL | FPL] = {
    "fedpcl": FedPCL(prior=True),
    "fpl": FPL(regularization=1.0),
}
"""Settings that the losses below implement."""

COLUMNS = ("eager ms", "compile ms", "device ms", "x eager", "x compile", "eager CPU", "device CPU", "x CPU")
BATCH_SIZE = 32

Arrays = Mapping[str, NDArray[Any]]


@click.command("step")
@click.option("--algorithm", type=click.Choice(["fedpcl", "fpl"]), default="fedpcl", show_default=True)
@repeated("--images", type=click.IntRange(min=1), default=(100, 640), help="Images of the device.")
@click.option(
    "--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Of each of the two."
)
@click.option("--repetitions", type=click.IntRange(min=1), default=30, show_default=True)
@click.option(
    "--compile/--no-compile",
    "compiled",
    default=True,
    show_default=True,
    help="Also time torch.compile, which needs a C++ compiler.",
)
@json_option
def command(
    *,
    algorithm: str,
    images: tuple[int, ...],
    threads: int,
    repetitions: int,
    compiled: bool,
    json_file: Path | None,
) -> None:
    """Time a device's local training against torch, eager and compiled, with one backbone and with three.

    Milliseconds and ratios are those of a whole training divided by its steps; the last ratio is that of processor time
    to eager torch's.
    """
    torch.set_num_threads(threads)
    settings, runs = SETTINGS[algorithm], {}
    title = f"{algorithm} to 256 values, batch {BATCH_SIZE}, {settings.epochs} epochs: ms of a step"
    table = Table({"features": "<12", "images": ">8", **dict.fromkeys(COLUMNS, ">12.2f")}, title=title)
    for count, backbones in itertools.product(images, (1, 3)):
        trainings = trainings_of(settings, backbones * FEATURES, count, threads=threads, compiled=compiled)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in trainings}
        for _ in range(repetitions):
            for name, training in trainings.items():
                times[name].append(_timed(training))
        runs[f"{backbones} backbones, {count} images"] = times
        table.row(
            f"{backbones} x {FEATURES}", count, *_cells(times, settings.epochs * -(-count // BATCH_SIZE))
        )
    write_json(json_file, "step", tables=[table], algorithm=algorithm, threads=threads, training_s=runs)


def _cells(times: Mapping[str, Sequence[tuple[float, float]]], steps: int) -> list[float | None]:
    """Return the cells of COLUMNS, None without torch.compile."""
    wall, cpu = (
        {
            name: statistics.median(each[clock] for each in every) / steps * 1e3
            for name, every in times.items()
        }
        for clock in (0, 1)
    )
    ours, eager, compiled = wall["graph"], wall["torch"], wall.get("compiled")
    ratios = eager / ours, compiled / ours if compiled else None, cpu["torch"] / cpu["graph"]
    return [eager, compiled, ours, *ratios[:2], cpu["torch"], cpu["graph"], ratios[2]]


def trainings_of(
    settings: FedPCL | FPL, feature_size: int, images: int, *, threads: int, compiled: bool
) -> dict[str, Callable[[], object]]:
    """Return the trainings that are compared, compiled already."""
    random = np.random.default_rng(0)
    feature = random.normal(size=(images, feature_size)).astype(np.float32)
    data = TrainingSet(feature, random.integers(0, CLASSES, size=images))
    graphs = build(settings, feature_size=feature_size, num_classes=CLASSES, seed=0)
    tensors = _round(settings, feature_size)
    schedule = Schedule(epochs=settings.epochs, batch_size=BATCH_SIZE, seed=(0,))
    trainings = {"graph": _graph_training(graphs, data, tensors, schedule, threads=threads)}
    for name in ("torch", "compiled") if compiled else ("torch",):
        kind: Any = _FedPCL if isinstance(settings, FedPCL) else _FPL
        learner = kind(settings, feature_size, tensors)
        trainings[name] = _torch_training(learner, data, schedule, compiled=name == "compiled")
        trainings[name]()
    return trainings


def _timed(training: Callable[[], object]) -> tuple[float, float]:
    """Return seconds, and seconds of processor time."""
    started = time.perf_counter(), time.process_time()
    training()
    return time.perf_counter() - started[0], time.process_time() - started[1]


def _round(settings: FedPCL | FPL, feature_size: int) -> Arrays:
    """A round's tensors, with every class of every device."""
    random = np.random.default_rng(1)
    first = settings.first_tensors(feature_size=feature_size, num_classes=CLASSES, seed=0)
    contributions = [
        Contribution(
            device=f"device-{number}",
            values=np.abs(random.normal(0, 1 / 16, (CLASSES, settings.projection_size))).astype(np.float32),
            labels=np.arange(CLASSES),
            counts=np.full(CLASSES, 10),
            tensors={name: np.zeros_like(first[name]) for name in settings.uploaded},
        )
        for number in range(DEVICES)
    ]
    return settings.aggregate(contributions, first, num_classes=CLASSES, seed=0)


def _graph_training(
    graphs: Graphs, data: TrainingSet, tensors: Arrays, schedule: Schedule, *, threads: int
) -> Callable[[], object]:
    """Return a training of the device program."""
    graph = open_graph(graphs.step, role="step", threads=threads)
    state = {**untrained(graphs.init, feature_size=data.feature.shape[1]), **tensors}
    start = Checkpoint({name: value for name, value in state.items() if name in graph.model.inputs})
    return lambda: train(graph, start, data, tensors=tensors, schedule=schedule, hooks=HOOKS)


def _torch_training(
    learner: "_FedPCL | _FPL", data: TrainingSet, schedule: Schedule, *, compiled: bool
) -> Callable[[], object]:
    """Return a training in torch, from where the last one ended."""
    features, targets = torch.from_numpy(data.feature), torch.from_numpy(data.labels)
    objective: Any = torch.compile(learner.loss) if compiled else learner.loss
    advance: Any = torch.compile(learner.optimizer.step) if compiled else learner.optimizer.step

    def training() -> None:
        for _ in range(schedule.epochs):
            for rows in torch.split(torch.randperm(len(features)), schedule.batch_size):
                learner.optimizer.zero_grad()
                loss = objective(features[rows], targets[rows])
                torch.autograd.backward(loss)
                advance()
                loss.item()

    return training


class _FedPCL:
    """FedPCL in plain torch."""

    def __init__(self, settings: FedPCL, feature_size: int, tensors: Arrays) -> None:
        self.layer = nn.Linear(feature_size, settings.projection_size)
        self.optimizer = torch.optim.Adam(
            self.layer.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.tau = settings.tau
        self.prior = torch.full((CLASSES,), 20.0).log()
        prototypes = torch.from_numpy(tensors["prototypes"].astype(np.float32))
        index = torch.from_numpy(tensors["index"].astype(np.int64))
        self.sets = torch.cat([prototypes[None, :CLASSES], prototypes[index]])

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        projection = functional.normalize(self.layer(features))
        logits = torch.einsum("nd,scd->ncs", projection, self.sets) / self.tau + self.prior[:, None]
        targets = labels[:, None].expand(-1, len(self.sets))
        losses = functional.cross_entropy(logits, targets, reduction="none")
        return (losses[:, 0] + losses[:, 1:].mean(1)).mean()


class _FPL:
    """FPL in plain torch."""

    def __init__(self, settings: FPL, feature_size: int, tensors: Arrays) -> None:
        self.adapter = nn.Linear(feature_size, settings.projection_size)
        self.classifier = nn.Linear(settings.projection_size, CLASSES)
        self.optimizer = torch.optim.SGD(
            [*self.adapter.parameters(), *self.classifier.parameters()],
            lr=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
        self.tau = settings.tau
        self.clusters = functional.normalize(torch.from_numpy(tensors["clusters"].astype(np.float32)))
        self.cluster_labels = torch.from_numpy(tensors["cluster_labels"].astype(np.int64))
        self.unbiased = torch.from_numpy(tensors["unbiased"].astype(np.float32))

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        adapted = torch.relu(self.adapter(features))
        logits = functional.normalize(adapted) @ self.clusters.T / self.tau
        mine = labels[:, None] == self.cluster_labels
        contrast = logits.logsumexp(1) - logits.masked_fill(~mine, -torch.inf).logsumexp(1)
        regularizer = (adapted - self.unbiased[labels]).square().mean(1)
        entropy = functional.cross_entropy(self.classifier(adapted), labels)
        return entropy + (contrast + regularizer).mean()
