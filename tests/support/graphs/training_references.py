"""The trainings in PyTorch that the `step` functions of algorithms reimplement."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from aggregator.algorithms import fedproto, fpl
from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fedpcl_step import contrast, hidden
from aggregator.algorithms.layers import unit
from aggregator.algorithms.local_model import features_of, logits_of

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """A training in PyTorch.

    Attributes:
        objective: the inputs of `step` to its loss, for autograd.
        optimizer: of these parameters.
        gradient: a parameter, and the state before and after the very first step, to the parameter's gradient, without
            weight decay.
    """

    objective: Callable[[Tensors], Tensor]
    optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer]
    gradient: Callable[[str, Tensors, Tensors], Tensor]


def reference_of(algorithm: RoundAlgorithm, *, num_classes: int) -> Reference:
    """Return the training of an algorithm that trains."""
    match algorithm:
        case FedPCL():
            return _fedpcl(algorithm, num_classes)
        case fpl.FPL():
            return _local_model(algorithm, partial(fpl.loss, algorithm))
        case fedproto.FedProto():
            return _local_model(algorithm, partial(fedproto.loss, algorithm))
        case _:
            raise TypeError(f"{algorithm.name} trains nothing")


def _fedpcl(settings: FedPCL, num_classes: int) -> Reference:
    return Reference(
        lambda tensors: contrast(settings, tensors, unit(hidden(tensors)), num_classes),
        lambda parameters: torch.optim.Adam(
            parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        ),
        lambda name, before, after: after[f"{name}_first"] - settings.weight_decay * before[name],
    )


def _local_model(
    settings: fpl.FPL | fedproto.FedProto, loss: Callable[[Tensors, Tensor, Tensor], Tensor]
) -> Reference:
    return Reference(
        lambda tensors: loss(tensors, features := features_of(tensors), logits_of(tensors, features)),
        lambda parameters: torch.optim.SGD(
            parameters,
            lr=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        ),
        lambda name, before, after: (
            -after[f"{name}_velocity"] / settings.learning_rate - settings.weight_decay * before[name]
        ),
    )
