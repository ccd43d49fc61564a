"""FedPCL on devices: projection, contrastive loss, Adam and inference, as torch functions to be traced."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aggregator.algorithms.algorithm import ABSENT_LOGIT, Function, Functions
from aggregator.algorithms.layers import (
    Tensors,
    log_prior,
    log_sum_exp,
    one_hot,
    standardized,
    statistics,
    tile_rows,
    unit,
)

if TYPE_CHECKING:
    from aggregator.algorithms.fedpcl import FedPCL

BETAS = (0.9, 0.999)
EPSILON = 1e-8

_PRIOR = "class_counts"
_PARAMETERS = ("weight", "bias")
_MOMENTS = ("weight_first", "weight_second", "bias_first", "bias_second")


def functions(settings: "FedPCL", *, feature_size: int, num_classes: int, seed: int) -> Functions:
    first = _first_projection(settings.projection_size, feature_size, seed)

    return Functions(
        init=Function(
            inputs=("feature", "labels") if settings.prior else ("feature",),
            apply=lambda tensors: _init(settings, tensors, first, num_classes),
        ),
        step=Function(
            inputs=(
                "feature",
                "labels",
                *settings.model,
                *settings.moments,
                *("prototypes", "index", "present"),
                *((_PRIOR,) if settings.prior else ()),
            ),
            apply=lambda tensors: _step(settings, tensors, num_classes),
        ),
        project=Function(
            inputs=("feature", *settings.model),
            apply=lambda tensors: {"projection": unit(hidden(tensors))},
        ),
        head=Function(
            inputs=("feature", *settings.model, "prototypes", "present", "local_prototypes", "local_counts"),
            apply=lambda tensors: _head(settings, tensors, num_classes),
        ),
        dimensions={
            "feature": ("n", None),
            "labels": ("n",),
            "prototypes": ("rows", None),
            "index": ("sets", None),
        },
        parameters=_PARAMETERS,
    )


def _first_projection(projection_size: int, feature_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return weight (D, L) and bias (D,), uniform in +-1/sqrt(L) as torch.nn.Linear; float16 halves the graph."""
    generator = torch.Generator().manual_seed(seed)
    shape = (projection_size, feature_size + 1)
    both = ((torch.rand(shape, generator=generator) * 2 - 1) * feature_size**-0.5).half()
    return both[:, :-1].clone(), both[:, -1].clone()


def _init(
    settings: "FedPCL", tensors: Tensors, first: tuple[Tensor, Tensor], num_classes: int
) -> dict[str, Tensor]:
    """Return the whole state; the weight (D, L) and its moments are stacks of tiles, (D / R, R, L)."""
    feature = tensors["feature"]
    mean, std = statistics(feature, standardize=settings.standardize)
    weight, bias = (tensor.float() for tensor in first)
    weight = weight.reshape(-1, tile_rows(*weight.shape), weight.shape[1])
    state = {_PRIOR: one_hot(tensors["labels"], num_classes).float().sum(dim=0)} if settings.prior else {}
    state |= {"weight": weight, "bias": bias, "mean": mean, "std": std}
    state |= {name: torch.zeros_like(state[name.partition("_")[0]]) for name in _MOMENTS}
    return {**state, "steps": feature.new_zeros(())}


def hidden(tensors: Tensors) -> Tensor:
    """Return W x + b, (n, D), of the standardized features."""
    return torch.addmm(tensors["bias"], standardized(tensors), tensors["weight"].flatten(0, 1).T)


def contrast(settings: "FedPCL", tensors: Tensors, projection: Tensor, num_classes: int) -> Tensor:
    """Return the loss of a batch of projections (n, D), () (eq. 8 to 10), as a cross-entropy: with the own class.

    Projections are of unit length: omitted in the paper, done in its published code. A class without prototypes is in
    no denominator. A sample whose class has none, or is the only one that has any, adds 0. `class_counts` is needed
    with a prior.
    """
    same, present = one_hot(tensors["labels"], num_classes), tensors["present"] > 0
    rivals = ~same & present
    counted = rivals.any(dim=1) & (same & present).any(dim=1)
    sets = torch.cat([torch.arange(num_classes)[None], tensors["index"]])  # the global prototypes first
    prototypes = tensors["prototypes"][sets.reshape(-1)]
    logits = (projection @ prototypes.T / settings.tau).reshape(-1, sets.shape[0], num_classes)
    if settings.prior:
        logits = logits + log_prior(tensors[_PRIOR])
    against = rivals | same
    own = torch.where(same[:, None], logits, 0.0).sum(dim=2)
    losses = (log_sum_exp(logits, against[:, None]) - own) * counted[:, None]
    return (losses @ _weights(logits.detach())).mean()


def _weights(logits: Tensor) -> Tensor:
    """Return the weight of each set's loss, (s,): L_g weighs as much as L_p, the mean over the others (eq. 10)."""
    every = torch.ones_like(logits[0, :, 0])
    return torch.cat([every[:1], every[1:] / every[1:].sum()])


def _step(settings: "FedPCL", tensors: Tensors, num_classes: int) -> dict[str, Tensor]:
    """Return the loss and the state after one step of Adam, as `torch.optim.Adam` makes it.

    The gradient of the weight is written out in tiles; autograd's would be one tensor.
    """
    inputs = standardized(tensors)
    weight, bias = tensors["weight"], tensors["bias"]
    values = torch.addmm(bias, inputs, weight.flatten(0, 1).T)

    def loss(values: Tensor) -> Tensor:
        return contrast(settings, tensors, unit(values), num_classes)

    slope, value = torch.func.grad_and_value(loss)(values)
    gradients = {
        "weight": torch.bmm(
            slope.T.reshape(weight.shape[0], weight.shape[1], -1), inputs.expand(weight.shape[0], -1, -1)
        )
        + settings.weight_decay * weight,
        "bias": slope.sum(dim=0) + settings.weight_decay * bias,
    }
    steps = tensors["steps"] + 1
    after = {"loss": value, "next_steps": steps}
    for name, gradient in gradients.items():
        after |= _adam(name, tensors, gradient, steps=steps, learning_rate=settings.learning_rate)
    return after


def _adam(
    name: str, tensors: Tensors, gradient: Tensor, *, steps: Tensor, learning_rate: float
) -> dict[str, Tensor]:
    """Return a parameter and its moments after a step (Kingma, Ba, "Adam", ICLR 2015, algorithm 1).

    To pass over the tensors as little as possible, the moments are decaying sums of the gradients and their squares;
    two scalars turn them into bias-corrected means.
    """
    decay_first, decay_second = BETAS
    first = tensors[f"{name}_first"] * decay_first + gradient
    second = tensors[f"{name}_second"] * decay_second + gradient * gradient
    spread = ((1 - decay_second**steps) / (1 - decay_second)).sqrt()
    rate = learning_rate * (1 - decay_first) / (1 - decay_first**steps) * spread
    return {
        f"next_{name}": tensors[name] - first / (second.sqrt() + EPSILON * spread) * rate,
        f"next_{name}_first": first,
        f"next_{name}_second": second,
    }


def _head(settings: "FedPCL", tensors: Tensors, num_classes: int) -> dict[str, Tensor]:
    """Return similarities to the device's own prototypes, padded with the global ones (section 4, eq. 7)."""
    own = tensors["local_counts"] > 0
    prototypes = torch.where(own[:, None], tensors["local_prototypes"], tensors["prototypes"][:num_classes])
    similarity = unit(hidden(tensors)) @ prototypes.T / settings.tau
    if settings.prior:
        similarity = similarity + log_prior(tensors["local_counts"])
    logits = torch.where(own | (tensors["present"] > 0), similarity, ABSENT_LOGIT)
    return {"logits": logits, "probabilities": logits.softmax(dim=1)}
