"""Time of a device's local step, beside the same step in eager torch.

`python -m benchmarks step` takes whole epochs in turns within one process, since the machine may be busy: read the
ratios, not the milliseconds. Features are random, for time does not depend on them.
"""

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
from benchmarks.accuracy.rounds import HOOKS
from benchmarks.report import Table, json_option, write_json
from edge_client.runtime.program_graph import open_graph
from edge_client.training.trainer import Checkpoint, Schedule, TrainingSet, train

FEATURES = 1280
"""Length of a feature of one MobileNetV2."""
CLASSES = 10
DEVICES = 5
STEPS = 20
"""Steps in an epoch."""

SETTINGS: dict[str, FedPCL | FPL] = {
    "fedpcl": FedPCL(loss="cross_entropy", relu=False, prior=True),
    "fpl": FPL(regularization=1.0),
}
"""Settings that the losses below implement."""

COLUMNS = ("torch_ms", "graph_ms", "ratio", "ratio_best")

Arrays = Mapping[str, NDArray[Any]]


@click.command("step")
@click.option("--algorithm", type=click.Choice(["fedpcl", "fpl"]), default="fedpcl", show_default=True)
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True)
@click.option(
    "--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Of each of the two."
)
@click.option("--repetitions", type=click.IntRange(min=1), default=30, show_default=True)
@json_option
def step(
    *,
    algorithm: Literal["fedpcl", "fpl"],
    batch_size: int,
    threads: int,
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Time a device's training step against eager torch's, with one backbone and with three."""
    torch.set_num_threads(threads)
    figures, runs = {}, {}
    columns = {"torch ms": ">10.2f", "graph ms": ">10.2f", "ratio": ">8.2f", "best": ">8.2f"}
    table = Table({"features": "<12", **columns}, title=f"{algorithm} to 256 values, batch {batch_size}")
    for backbones in (1, 3):
        times, every = measure(
            algorithm,
            feature_size=backbones * FEATURES,
            batch_size=batch_size,
            threads=threads,
            repetitions=repetitions,
        )
        name = f"{algorithm}_{backbones}_backbones"
        figures[name], runs[name] = times, every
        table.row(f"{backbones} x {FEATURES}", *(times[column] for column in COLUMNS))
    write_json(json_file, "step", figures=figures, epoch_s=runs)


def measure(
    algorithm: Literal["fedpcl", "fpl"],
    *,
    feature_size: int,
    batch_size: int,
    threads: int,
    repetitions: int,
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return milliseconds of a step, median and best of the epochs, the ratio to torch, and seconds of each epoch."""
    settings = SETTINGS[algorithm]
    graphs = build(settings, feature_size=feature_size, num_classes=CLASSES, seed=0)
    random = np.random.default_rng(0)
    feature = random.normal(size=(STEPS * batch_size, feature_size)).astype(np.float32)
    labels = random.integers(0, CLASSES, size=len(feature))
    tensors = _round(settings, feature_size)
    ours = _graph_epoch(graphs, feature, labels, tensors, batch_size=batch_size, threads=threads)
    learner = (
        _FedPCL(settings, feature_size, tensors)
        if isinstance(settings, FedPCL)
        else _FPL(settings, feature_size, tensors)
    )
    theirs = _torch_epoch(learner, feature, labels, batch_size=batch_size)
    times: dict[str, list[float]] = {"graph": [], "torch": []}
    for _ in range(repetitions):
        times["graph"].append(_timed(ours))
        times["torch"].append(_timed(theirs))
    figures = {"graph_bytes": float(len(graphs.step))}
    for suffix, pick in (("", statistics.median), ("_best", min)):
        graph_s, torch_s = (pick(times[name]) for name in ("graph", "torch"))
        figures[f"graph{suffix}_ms"] = graph_s / STEPS * 1e3
        figures[f"torch{suffix}_ms"] = torch_s / STEPS * 1e3
        figures[f"ratio{suffix}"] = torch_s / graph_s
    return figures, times


def _timed(epoch: Callable[[], object]) -> float:
    started = time.perf_counter()
    epoch()
    return time.perf_counter() - started


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


def _graph_epoch(
    graphs: Graphs,
    feature: NDArray[np.float32],
    labels: NDArray[np.int64],
    tensors: Arrays,
    *,
    batch_size: int,
    threads: int,
) -> Callable[[], object]:
    """Return an epoch of the device program."""
    graph = open_graph(graphs.step, role="step", threads=threads)
    state = {**untrained(graphs.init, feature_size=feature.shape[1]), **tensors}
    start = Checkpoint({name: value for name, value in state.items() if name in graph.model.inputs})
    schedule = Schedule(epochs=1, batch_size=batch_size, seed=(0,))
    data = TrainingSet(feature, labels)
    return lambda: train(graph, start, data, tensors=tensors, schedule=schedule, hooks=HOOKS)


def _torch_epoch(
    learner: "_FedPCL | _FPL",
    feature: NDArray[np.float32],
    labels: NDArray[np.int64],
    *,
    batch_size: int,
) -> Callable[[], object]:
    """Return an epoch in eager torch."""
    features, targets = torch.from_numpy(feature), torch.from_numpy(labels)

    def epoch() -> None:
        for rows in torch.split(torch.randperm(len(features)), batch_size):
            learner.optimizer.zero_grad()
            loss = learner.loss(features[rows], targets[rows])
            torch.autograd.backward(loss)
            learner.optimizer.step()
            loss.item()

    return epoch


class _FedPCL:
    """FedPCL in plain torch."""

    def __init__(self, settings: FedPCL, feature_size: int, tensors: Arrays) -> None:
        self.layer = nn.Linear(feature_size, settings.projection_size)
        self.optimizer = torch.optim.Adam(
            self.layer.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.tau = settings.tau
        self.prior = torch.full((CLASSES,), 1.1 * STEPS).log()
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
