"""Time of a device's local training, beside the same in eager torch and with torch.compile.

`cost step` takes whole trainings of a round in turns within one process, since the machine may be busy: read the
ratios, not the milliseconds. A training is the device program's own, with all that is done before the first and after
the last step. Features are random, for time does not depend on them.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

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
from benchmarks.report import Table, json_option, write_json
from edge_client.runtime.program_graph import open_graph
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

COLUMNS = {
    "torch_ms": "eager ms",
    "compiled_ms": "compile ms",
    "graph_ms": "device ms",
    "ratio": "x eager",
    "ratio_compiled": "x compile",
    "torch_cpu_ms": "eager CPU",
    "graph_cpu_ms": "device CPU",
    "ratio_cpu": "x CPU",
}
"""Headings of figures."""

Arrays = Mapping[str, NDArray[Any]]


@click.command("step")
@click.option("--algorithm", type=click.Choice(["fedpcl", "fpl"]), default="fedpcl", show_default=True)
@click.option(
    "--images",
    type=click.IntRange(min=1),
    multiple=True,
    default=(100, 640),
    show_default=True,
    help="Images of the device.",
)
@click.option("--epochs", type=click.IntRange(min=1), help="Of a round; by default those of the algorithm.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True)
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
    algorithm: Literal["fedpcl", "fpl"],
    images: tuple[int, ...],
    epochs: int | None,
    batch_size: int,
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
    epochs = epochs or SETTINGS[algorithm].epochs
    figures, runs = {}, {}
    title = f"{algorithm} to 256 values, batch {batch_size}, {epochs} epochs: ms of a step"
    columns = dict.fromkeys(COLUMNS.values(), ">12.2f")
    table = Table({"features": "<12", "images": ">8", **columns}, title=title)
    for count, backbones in itertools.product(images, (1, 3)):
        times, every = measure(
            algorithm,
            feature_size=backbones * FEATURES,
            images=count,
            epochs=epochs,
            batch_size=batch_size,
            threads=threads,
            repetitions=repetitions,
            compiled=compiled,
        )
        name = f"{algorithm}_{backbones}_backbones_{count}_images"
        figures[name], runs[name] = times, every
        table.row(f"{backbones} x {FEATURES}", count, *(times.get(column) for column in COLUMNS))
    options = {"epochs": epochs, "batch_size": batch_size, "threads": threads}
    write_json(json_file, "step", tables=[table], options=options, figures=figures, training_s=runs)


def measure(
    algorithm: Literal["fedpcl", "fpl"],
    *,
    feature_size: int,
    images: int,
    epochs: int,
    batch_size: int,
    threads: int,
    repetitions: int,
    compiled: bool,
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return milliseconds of a step, median and best, ratios to torch, and the seconds of each training."""
    settings = SETTINGS[algorithm]
    graphs = build(settings, feature_size=feature_size, num_classes=CLASSES, seed=0)
    random = np.random.default_rng(0)
    feature = random.normal(size=(images, feature_size)).astype(np.float32)
    labels = random.integers(0, CLASSES, size=len(feature))
    tensors = _round(settings, feature_size)
    schedule = Schedule(epochs=epochs, batch_size=batch_size, seed=(0,))
    data = TrainingSet(feature, labels)
    rivals = {"graph": _graph_training(graphs, data, tensors, schedule, threads=threads)}
    for name in ("torch", "compiled") if compiled else ("torch",):
        learner = (
            _FedPCL(settings, feature_size, tensors)
            if isinstance(settings, FedPCL)
            else _FPL(settings, feature_size, tensors)
        )
        rivals[name] = _torch_training(learner, data, schedule, compiled=name == "compiled")
        rivals[name]()  # compiles
    times: dict[str, list[float]] = {name: [] for name in (*rivals, *(f"{name}_cpu" for name in rivals))}
    for _ in range(repetitions):
        for name, training in rivals.items():
            wall_s, cpu_s = _timed(training)
            times[name].append(wall_s)
            times[f"{name}_cpu"].append(cpu_s)
    steps = epochs * -(-images // batch_size)
    figures = {"graph_bytes": float(len(graphs.step)), "steps": float(steps)}
    for name, every in times.items():
        figures[f"{name}_ms"] = statistics.median(every) / steps * 1e3
        figures[f"{name}_best_ms"] = min(every) / steps * 1e3
    for suffix, kind in (("", "_ms"), ("_cpu", "_cpu_ms"), ("_best", "_best_ms")):
        figures[f"ratio{suffix}"] = figures[f"torch{kind}"] / figures[f"graph{kind}"]
    if compiled:
        figures["ratio_compiled"] = figures["compiled_ms"] / figures["graph_ms"]
    return figures, times


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
