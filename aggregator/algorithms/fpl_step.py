"""FPL on the device: adapter and classifier, their three losses, and SGD, as torch functions to be traced."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aggregator.algorithms.layers import log_sum_exp, one_hot, statistics, unit
from aggregator.algorithms.program import Function, Functions

if TYPE_CHECKING:
    from aggregator.algorithms.fpl import FPL

PARAMETERS = ("adapter_weight", "adapter_bias", "classifier_weight", "classifier_bias")
_VELOCITIES = tuple(f"{name}_velocity" for name in PARAMETERS)
_MODEL = (*PARAMETERS, "mean", "std")
_ROUND = ("clusters", "cluster_labels", "unbiased", "present")

Tensors = Mapping[str, Tensor]


def functions(settings: "FPL", *, feature_size: int, num_classes: int) -> Functions:
    """Return what a device runs.

    Args:
        settings: the algorithm's.
        feature_size: L.
        num_classes: C.
    """
    return Functions(
        init=Function(
            inputs=("feature",),
            apply=lambda tensors: _init(settings, tensors["feature"], feature_size, num_classes),
        ),
        step=Function(
            inputs=("feature", "labels", *_MODEL, *_VELOCITIES, *_ROUND),
            apply=lambda tensors: _step(settings, tensors),
        ),
        project=Function(
            inputs=("feature", "adapter_weight", "adapter_bias", "mean", "std"),
            apply=lambda tensors: {"projection": hidden(tensors).relu()},
        ),
        head=Function(inputs=("feature", *_MODEL), apply=_head),
        dimensions={
            "feature": ("n", None),
            "labels": ("n",),
            "clusters": ("clusters", None),
            "cluster_labels": ("clusters",),
        },
        parameters=PARAMETERS,
        objective=lambda tensors: loss(
            settings, tensors, hidden(tensors), tensors["classifier_weight"], tensors["classifier_bias"]
        ),
        optimizer=lambda parameters: torch.optim.SGD(
            parameters,
            lr=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        ),
        gradients=lambda before, after: {
            name: -after[f"{name}_velocity"] / settings.learning_rate - settings.weight_decay * before[name]
            for name in PARAMETERS
        },
    )


def _init(settings: "FPL", feature: Tensor, feature_size: int, num_classes: int) -> dict[str, Tensor]:
    """Statistics, and zeros for what every round brings along."""
    mean, std = statistics(feature, standardize=settings.standardize)
    shapes = {
        "adapter_weight": (settings.adapter_size, feature_size),
        "adapter_bias": (settings.adapter_size,),
        "classifier_weight": (num_classes, settings.adapter_size),
        "classifier_bias": (num_classes,),
    }
    zeros = {
        f"{name}{suffix}": feature.new_zeros(shape)
        for name, shape in shapes.items()
        for suffix in ("", "_velocity")
    }
    return {**zeros, "mean": mean, "std": std}


def standardized(tensors: Tensors) -> Tensor:
    """Return the features, (n, L), as the adapter takes them."""
    return (tensors["feature"] - tensors["mean"]) / tensors["std"]


def hidden(tensors: Tensors) -> Tensor:
    """Return what goes into the adapter's ReLU, (n, D)."""
    return torch.addmm(tensors["adapter_bias"], standardized(tensors), tensors["adapter_weight"].T)


def loss(settings: "FPL", tensors: Tensors, values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return CE + CPCL + weighted UPCR of a batch, () (eq. 12); a sample whose class nobody has adds CE alone.

    UPCR is the mean over dimensions, as in the published code; the paper prints a sum (eq. 9).

    Args:
        settings: the temperature, and the weight.
        tensors: `labels`, `clusters`, `cluster_labels`, `unbiased` and `present`.
        values: (n, D), what goes into the adapter's ReLU.
        weight: (C, D), the classifier's.
        bias: (C,), the classifier's.
    """
    labels, present = tensors["labels"], tensors["present"]
    features = values.relu()
    logits = torch.addmm(bias, features, weight.T)
    entropy = log_sum_exp(logits, torch.ones_like(logits, dtype=torch.bool))
    entropy = entropy - torch.where(one_hot(labels, logits.shape[1]), logits, 0.0).sum(dim=1)
    cosines = unit(features) @ unit(tensors["clusters"]).T / settings.tau
    mine = labels[:, None] == tensors["cluster_labels"]
    # eq. 7 and 8: the own class's clusters against all of them
    contrast = log_sum_exp(cosines, torch.ones_like(mine)) - log_sum_exp(cosines, mine)
    away = features - tensors["unbiased"][labels]
    regularizer = (away * away).mean(dim=1)  # eq. 9
    return (entropy + (contrast + settings.regularization * regularizer) * present[labels]).mean()


def _step(settings: "FPL", tensors: Tensors) -> dict[str, Tensor]:
    """One step of SGD, as `torch.optim.SGD` takes it.

    The gradient of the adapter's weight is written out, so that it, the decay and the rate are one operation.
    """
    inputs = standardized(tensors)
    values = torch.addmm(tensors["adapter_bias"], inputs, tensors["adapter_weight"].T)
    weight, bias = tensors["classifier_weight"], tensors["classifier_bias"]
    slopes, value = torch.func.grad_and_value(
        lambda values, weight, bias: loss(settings, tensors, values, weight, bias), argnums=(0, 1, 2)
    )(values, weight, bias)
    rate, shrink = -settings.learning_rate, -settings.learning_rate * settings.weight_decay
    slope = slopes[0] * rate
    pushes = {
        "adapter_weight": torch.addmm(tensors["adapter_weight"], slope.T, inputs, beta=shrink),
        "adapter_bias": slope.sum(dim=0) + shrink * tensors["adapter_bias"],
        "classifier_weight": slopes[1] * rate + shrink * weight,
        "classifier_bias": slopes[2] * rate + shrink * bias,
    }
    after = {"loss": value}
    for name, push in pushes.items():
        velocity = tensors[f"{name}_velocity"] * settings.momentum + push
        after |= {f"next_{name}": tensors[name] + velocity, f"next_{name}_velocity": velocity}
    return after


def _head(tensors: Tensors) -> dict[str, Tensor]:
    logits = torch.addmm(tensors["classifier_bias"], hidden(tensors).relu(), tensors["classifier_weight"].T)
    return {"logits": logits, "probabilities": logits.softmax(dim=1)}
