"""PyTorch in tests: a small network with its metadata, a faster exporter, and a program's graphs beside PyTorch."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._export.utils import _collect_all_valid_cia_ops
from torch.export import decomp_utils, exported_program
from torch.onnx._internal.exporter._registration import ONNXRegistry

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.graphs.parity import Graph, Tensors, opened, precise, random_case, require_equal
from aggregator.graphs.program_export import Graphs
from protocol.models.onnx_metadata import BackboneMetadata
from protocol.models.preprocessing import Preprocessing
from tests.support.graphs.training_references import Reference, reference_of

EDGE = 16
FEATURE_SIZE = 12


def tiny_network() -> nn.Module:
    """A convolutional network of two layers: (n, 3, H, W) to (n, 12)."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Conv2d(8, FEATURE_SIZE, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).eval()


def described(*, feature_size: int = FEATURE_SIZE) -> BackboneMetadata:
    return BackboneMetadata(
        model="tiny",
        feature_size=feature_size,
        preprocessing=Preprocessing(height=EDGE, width=EDGE, crop_pct=0.875),
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.25, 0.3),
        weights_sha256="0" * 64,
    )


_listed = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
_composite = functools.cache(_collect_all_valid_cia_ops)


@contextmanager
def listed_operators() -> Iterator[None]:
    """Let the exporter list PyTorch's operators for the first graph only, which takes a third of the time."""
    with (
        patch.object(ONNXRegistry, "from_torchlib", _listed),
        patch.object(exported_program, "_collect_all_valid_cia_ops", _composite),
        patch.object(decomp_utils, "_collect_all_valid_cia_ops", _composite),
    ):
        yield


@pytest.fixture(scope="package", autouse=True)
def operators_are_listed_once() -> Iterator[None]:
    """Export the graphs of a package's tests with `listed_operators`."""
    with listed_operators():
        yield


BATCHES = (1, 5, 32)
"""Images in a step."""
FLEETS = (0, 1, 3, 17)
"""Contributions aggregated into the previous round."""
STEPS = 10


def check_all_cases(
    graphs: Graphs, algorithm: RoundAlgorithm, *, feature_size: int, num_classes: int
) -> None:
    """Raise ProtofleetError if a graph differs from PyTorch in any of the cases."""
    functions = algorithm.functions(feature_size=feature_size, num_classes=num_classes, seed=0)
    run = {role: opened(file) for role, file in vars(graphs).items()}
    reference = reference_of(algorithm, num_classes=num_classes) if functions.parameters else None
    for devices in FLEETS:
        for batch in BATCHES:
            tensors = random_case(
                algorithm,
                functions,
                feature_size=feature_size,
                num_classes=num_classes,
                batch=batch,
                devices=devices,
            )
            for role in ("init", "project", "head", *([] if functions.parameters else ["step"])):
                apply = getattr(functions, role).apply
                require_equal(run[role](tensors), apply(tensors), apply(precise(tensors)), what=role)
            if reference is not None:
                _check_training(run["step"], functions.parameters, tensors, reference)
    nothing = {"feature": torch.zeros(0, feature_size), "labels": torch.zeros(0, dtype=torch.int64)}
    for name, value in functions.init.apply(nothing).items():
        assert torch.equal(run["init"](nothing)[name], value)


def _check_training(step: Graph, names: Sequence[str], tensors: Tensors, reference: Reference) -> None:
    """Compare the first loss and gradients, and the losses and parameters of ten steps, with PyTorch's optimizer."""
    ours = _steps_of_graph(step, names, tensors, reference)
    theirs, exact = (_steps_of_torch(names, each, reference) for each in (tensors, precise(tensors)))
    require_equal(*(each.first for each in (ours, theirs, exact)), what="the first step")
    rest = [each.rest for each in (ours, theirs, exact)]
    require_equal(*rest, what="ten steps", parameters=rest[0])


@dataclass(frozen=True)
class Steps:
    """The first loss and its gradients; the later losses, and the parameters after them."""

    first: Tensors
    rest: Tensors


def _steps_of_torch(names: Sequence[str], tensors: Tensors, reference: Reference) -> Steps:
    parameters = {name: tensors[name].clone().requires_grad_() for name in names}
    optimizer = reference.optimizer(list(parameters.values()))
    losses, gradients = [], list[dict[str, Tensor]]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(reference.objective({**tensors, **parameters}))
        torch.autograd.backward(losses[-1])
        gradients.append(
            {name: each.grad.clone() for name, each in parameters.items() if each.grad is not None}
        )
        optimizer.step()
    first, *later = (loss.detach() for loss in losses)
    after = {name: value.detach() for name, value in parameters.items()}
    return Steps({"loss": first, **gradients[0]}, {"losses": torch.stack(later), **after})


def _steps_of_graph(step: Graph, names: Sequence[str], tensors: Tensors, reference: Reference) -> Steps:
    states, losses = [dict(tensors)], []
    for _ in range(STEPS):
        after = step(states[-1])
        losses.append(after.pop("loss"))
        changed = {name.removeprefix("next_"): value for name, value in after.items()}
        states.append({**states[-1], **changed})
    gradients = {name: reference.gradient(name, states[0], states[1]) for name in names}
    parameters = {name: states[-1][name] for name in names}
    return Steps({"loss": losses[0], **gradients}, {"losses": torch.stack(losses[1:]), **parameters})
