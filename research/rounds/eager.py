"""An algorithm's rounds by its torch functions, without graphs and messages: the choice of settings needs many runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aggregator.algorithms.algorithm import Contribution, Functions, RoundAlgorithm
from aggregator.algorithms.layers import Tensors
from protofleet.simulation.fleet import Client


@dataclass(frozen=True)
class _Device:
    feature: Tensor
    labels: Tensor
    counts: Tensor
    """Images of each class, (C,)."""


def eager_accuracies(
    algorithm: RoundAlgorithm, clients: Sequence[Client], *, classes: int, seed: int
) -> NDArray[np.float64]:
    """Return each client's accuracy with its own head, (K,), as `run_rounds` but for the order of the images."""
    sizes = {"feature_size": clients[0].train.shape[1], "num_classes": classes, "seed": seed}
    functions = algorithm.functions(**sizes)
    devices = [_device(client, classes) for client in clients]
    tensors = algorithm.first_tensors(**sizes)
    states: list[dict[str, Tensor]] = [{} for _ in devices]
    prototypes: list[Tensor] = []
    torch.manual_seed(seed)
    for number in range(algorithm.rounds):
        opened = {name: _as_graphs_take_it(values) for name, values in tensors.items()}
        states = [
            _train(algorithm, functions, device, state, opened, epochs=algorithm.epochs_of(number))
            for device, state in zip(devices, states, strict=True)
        ]
        prototypes = [
            _class_means(functions, device, {**opened, **state})
            for device, state in zip(devices, states, strict=True)
        ]
        parts = [
            _contribution(algorithm, index, device, mine, state, opened)
            for index, (device, mine, state) in enumerate(zip(devices, prototypes, states, strict=True))
        ]
        tensors = algorithm.aggregate(parts, tensors, num_classes=classes, seed=seed + number + 1)
    last = {name: _as_graphs_take_it(values) for name, values in tensors.items()}
    return np.array(
        [
            client.accuracy(_predicted(functions, client, device, mine, {**last, **state}))
            for client, device, mine, state in zip(clients, devices, prototypes, states, strict=True)
        ]
    )


def _as_graphs_take_it(values: NDArray[np.generic]) -> Tensor:
    """Return a round's tensor as float32, or as int64 if its values are numbers of rows."""
    return torch.from_numpy(values.astype(np.int64 if values.dtype == np.uint32 else np.float32))


def _device(client: Client, classes: int) -> _Device:
    labels = torch.from_numpy(client.train_labels)
    return _Device(torch.from_numpy(client.train), labels, torch.bincount(labels, minlength=classes).float())


def _train(
    algorithm: RoundAlgorithm,
    functions: Functions,
    device: _Device,
    kept: dict[str, Tensor],
    opened: Tensors,
    *,
    epochs: int,
) -> dict[str, Tensor]:
    """Return the state of a device after a round."""
    state = functions.init.apply({"feature": device.feature, "labels": device.labels})
    state |= {name: kept[name] for name in algorithm.persistent if name in kept}
    state |= {name: opened[name] for name in state if name in opened}
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(device.labels)), algorithm.batch_size):
            batch = {"feature": device.feature[rows], "labels": device.labels[rows]}
            after = functions.step.apply({**opened, **state, **batch})
            state |= {name: after.get(f"next_{name}", values) for name, values in state.items()}
    return state


def _class_means(functions: Functions, device: _Device, tensors: Tensors) -> Tensor:
    """Return the device's prototypes (C, D), rounded as they are sent."""
    projection = functions.project.apply({**tensors, "feature": device.feature})["projection"]
    sums = torch.zeros(len(device.counts), projection.shape[1]).index_add_(0, device.labels, projection)
    return (sums / device.counts.clamp_min(1)[:, None]).half().float()


def _contribution(
    algorithm: RoundAlgorithm,
    index: int,
    device: _Device,
    prototypes: Tensor,
    state: Tensors,
    opened: Tensors,
) -> Contribution:
    labels = torch.nonzero(device.counts)[:, 0]
    return Contribution(
        device=str(index),
        values=prototypes[labels].numpy(),
        labels=labels.numpy(),
        counts=device.counts[labels].long().numpy(),
        tensors={name: (state[name] - opened[name]).half().float().numpy() for name in algorithm.uploaded},
    )


def _predicted(
    functions: Functions, client: Client, device: _Device, prototypes: Tensor, tensors: Tensors
) -> NDArray[np.int64]:
    local = {"local_prototypes": prototypes, "local_counts": device.counts}
    given = {**tensors, **local, "feature": torch.from_numpy(client.test)}
    predicted: NDArray[np.int64] = functions.head.apply(given)["logits"].argmax(dim=1).numpy()
    return predicted
