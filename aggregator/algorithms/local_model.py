"""The model of FPL and FedProto: an adapter and a classifier on standardized features, trained by SGD with momentum.

Its functions call methods of tensors, so that importing this module does not import torch.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import Function, Functions

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = Mapping[str, Tensor]
    Loss = Callable[[Tensors, Tensor, Tensor], Tensor]
    """A batch's loss, (): from the step's inputs, the adapter's output (n, D) and the logits (n, C)."""

PARAMETERS = ("adapter_weight", "adapter_bias", "classifier_weight", "classifier_bias")
MODEL = (*PARAMETERS, "mean", "std")


class Settings(Protocol):
    """The settings of an algorithm that trains this model."""

    @property
    def projection_size(self) -> int:
        """D, of the adapter's output."""

    @property
    def standardize(self) -> bool:
        """Train on features of mean 0, and deviation 1 over all of them, on the device's own images."""

    @property
    def learning_rate(self) -> float:
        """SGD's learning rate."""

    @property
    def momentum(self) -> float:
        """SGD's momentum."""

    @property
    def weight_decay(self) -> float:
        """L2, as part of the gradient."""


def initial_parameters(
    settings: Settings, *, feature_size: int, num_classes: int, seed: int
) -> dict[str, NDArray[np.float32]]:
    """Return random parameters, uniform in +-1/sqrt(inputs) as PyTorch initializes linear layers."""
    random = np.random.default_rng(seed)
    parameters = {}
    for name, shape in _shapes(settings, feature_size, num_classes).items():
        bound = (feature_size if name.startswith("adapter") else settings.projection_size) ** -0.5
        parameters[name] = random.uniform(-bound, bound, shape).astype(np.float32)
    return parameters


def functions(
    settings: Settings,
    *,
    loss: "Loss",
    head: Function,
    round_tensors: Mapping[str, tuple[str | None, ...]],
    feature_size: int,
    num_classes: int,
    initial: Mapping[str, NDArray[np.float32]] | None = None,
) -> Functions:
    """Return what devices run to train the model; imports torch.

    `round_tensors` are the round's tensors that `loss` takes, with their dynamic axes; `initial` are the parameters
    that a device starts from, zeros if every round brings its own.
    """
    import torch

    velocities = tuple(f"{name}_velocity" for name in PARAMETERS)
    shapes = _shapes(settings, feature_size, num_classes)

    def init(tensors: "Tensors") -> "dict[str, Tensor]":
        from aggregator.algorithms.layers import statistics

        feature = tensors["feature"]
        zeros = {name: feature.new_zeros(shape) for name, shape in shapes.items()}
        # float16 halves the graph that is sent.
        first = {name: torch.from_numpy(values).half().float() for name, values in (initial or {}).items()}
        momenta = {f"{name}_velocity": feature.new_zeros(shape) for name, shape in shapes.items()}
        mean, std = statistics(feature, standardize=settings.standardize)
        return {**zeros, **first, **momenta, "mean": mean, "std": std}

    return Functions(
        init=Function(inputs=("feature",), apply=init),
        step=Function(
            inputs=("feature", "labels", *MODEL, *velocities, *round_tensors),
            apply=lambda tensors: _step(settings, tensors, loss),
        ),
        project=Function(
            inputs=("feature", "adapter_weight", "adapter_bias", "mean", "std"),
            apply=lambda tensors: {"projection": features_of(tensors)},
        ),
        head=head,
        dimensions={
            "feature": ("n", None),
            "labels": ("n",),
            **{name: axes for name, axes in round_tensors.items() if any(axes)},
        },
        parameters=PARAMETERS,
    )


def features_of(tensors: "Tensors") -> "Tensor":
    """Return the adapter's output, (n, D)."""
    from aggregator.algorithms.layers import standardized

    return tensors["adapter_bias"].addmm(standardized(tensors), tensors["adapter_weight"].T).relu()


def logits_of(tensors: "Tensors", features: "Tensor") -> "Tensor":
    """Return the classifier's output, (n, C), for the adapter's, (n, D)."""
    return tensors["classifier_bias"].addmm(features, tensors["classifier_weight"].T)


def _shapes(settings: Settings, feature_size: int, num_classes: int) -> dict[str, tuple[int, ...]]:
    return {
        "adapter_weight": (settings.projection_size, feature_size),
        "adapter_bias": (settings.projection_size,),
        "classifier_weight": (num_classes, settings.projection_size),
        "classifier_bias": (num_classes,),
    }


def _step(settings: Settings, tensors: "Tensors", loss: "Loss") -> "dict[str, Tensor]":
    """Return the loss and the state after one step of SGD, as `torch.optim.SGD` makes it.

    The gradient of the adapter's weight is written out, so that it, the decay and the rate are one operation.
    """
    import torch

    from aggregator.algorithms.layers import standardized

    def objective(hidden: "Tensor", weight: "Tensor", bias: "Tensor") -> "Tensor":
        features = hidden.relu()
        return loss(tensors, features, bias.addmm(features, weight.T))

    inputs = standardized(tensors)
    hidden = tensors["adapter_bias"].addmm(inputs, tensors["adapter_weight"].T)
    weight, bias = tensors["classifier_weight"], tensors["classifier_bias"]
    slopes, value = torch.func.grad_and_value(objective, argnums=(0, 1, 2))(hidden, weight, bias)
    rate, shrink = -settings.learning_rate, -settings.learning_rate * settings.weight_decay
    slope = slopes[0] * rate
    pushes = {
        "adapter_weight": tensors["adapter_weight"].addmm(slope.T, inputs, beta=shrink),
        "adapter_bias": slope.sum(dim=0) + shrink * tensors["adapter_bias"],
        "classifier_weight": slopes[1] * rate + shrink * weight,
        "classifier_bias": slopes[2] * rate + shrink * bias,
    }
    after = {"loss": value}
    for name, push in pushes.items():
        velocity = tensors[f"{name}_velocity"] * settings.momentum + push
        after |= {f"next_{name}": tensors[name] + velocity, f"next_{name}_velocity": velocity}
    return after
