"""FedPCL on the device: projection, contrastive loss, Adam and inference, as torch functions to be traced."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aggregator.algorithms.layers import log_sum_exp, one_hot, statistics, tile_rows, unit
from aggregator.algorithms.program import ABSENT_LOGIT, Function, Functions

if TYPE_CHECKING:
    from aggregator.algorithms.fedpcl import FedPCL

BETAS = (0.9, 0.999)
EPSILON = 1e-8

_PARAMETERS = ("weight", "bias")
_MODEL = (*_PARAMETERS, "mean", "std")
_PRIOR = "class_counts"
_ADAM = ("weight_first", "weight_second", "bias_first", "bias_second", "steps")

Tensors = Mapping[str, Tensor]


def functions(settings: "FedPCL", *, feature_size: int, num_classes: int, seed: int) -> Functions:
    """Return what a device runs.

    Args:
        settings: the algorithm's.
        feature_size: L.
        num_classes: C.
        seed: of the first projection, the same on every device.
    """
    rounds = ("prototypes", "present") if settings.variant == "global" else ("prototypes", "index", "present")
    first = _first_projection(settings.projection_size, feature_size, seed)

    def loss(tensors: Tensors, values: Tensor) -> Tensor:
        return contrast(settings, tensors, projected(settings, values), num_classes)

    return Functions(
        init=Function(
            inputs=("feature", "labels") if settings.prior else ("feature",),
            apply=lambda tensors: _init(settings, tensors, first, num_classes),
        ),
        step=Function(
            inputs=("feature", "labels", *_MODEL, *_ADAM, *rounds, *((_PRIOR,) if settings.prior else ())),
            apply=lambda tensors: _step(settings, tensors, loss),
        ),
        project=Function(
            inputs=("feature", *_MODEL),
            apply=lambda tensors: {"projection": projected(settings, hidden(tensors))},
        ),
        head=Function(
            inputs=("feature", *_MODEL, "prototypes", "present", "local_prototypes", "local_counts"),
            apply=lambda tensors: _head(settings, tensors, num_classes),
        ),
        dimensions={
            "feature": ("n", None),
            "labels": ("n",),
            "prototypes": ("rows", None),
            "index": ("sets", None),
        },
        parameters=_PARAMETERS,
        objective=lambda tensors: loss(tensors, hidden(tensors)),
        optimizer=lambda parameters: torch.optim.Adam(
            parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        ),
        gradients=lambda before, after: {
            name: after[f"{name}_first"] - settings.weight_decay * before[name] for name in _PARAMETERS
        },
    )


def _first_projection(projection_size: int, feature_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weight (D, L) and bias (D,), uniform in +-1/sqrt(L) as torch's linear layers begin; float16, to ship less."""
    generator = torch.Generator().manual_seed(seed)
    shape = (projection_size, feature_size + 1)
    both = ((torch.rand(shape, generator=generator) * 2 - 1) * feature_size**-0.5).half()
    return both[:, :-1].clone(), both[:, -1].clone()


def _init(
    settings: "FedPCL", tensors: Tensors, first: tuple[Tensor, Tensor], num_classes: int
) -> dict[str, Tensor]:
    """The whole state; the weight (D, L) is a stack of tiles, (D / R, R, L), and so are its moments."""
    feature = tensors["feature"]
    mean, std = statistics(feature, standardize=settings.standardize)
    weight, bias = (tensor.float() for tensor in first)
    weight = weight.reshape(-1, tile_rows(*weight.shape), weight.shape[1])
    counts = one_hot(tensors["labels"], num_classes).float().sum(dim=0) if settings.prior else None
    return {
        **({} if counts is None else {_PRIOR: counts}),
        "weight": weight,
        "bias": bias,
        "mean": mean,
        "std": std,
        "weight_first": torch.zeros_like(weight),
        "weight_second": torch.zeros_like(weight),
        "bias_first": torch.zeros_like(bias),
        "bias_second": torch.zeros_like(bias),
        "steps": feature.new_zeros(()),
    }


def standardized(tensors: Tensors) -> Tensor:
    """Return the features, (n, L), as the projection takes them."""
    return (tensors["feature"] - tensors["mean"]) / tensors["std"]


def hidden(tensors: Tensors) -> Tensor:
    """Return W x + b, (n, D), of the standardized features."""
    return torch.addmm(tensors["bias"], standardized(tensors), tensors["weight"].flatten(0, 1).T)


def projected(settings: "FedPCL", values: Tensor) -> Tensor:
    """Return z, (n, D): of unit length, which the paper leaves out and its published code does."""
    return unit(values.relu() if settings.relu else values)


def log_prior(counts: Tensor) -> Tensor:
    """Return the log of how often a device expects each class, (C,), up to a constant.

    A class that it has no image of is not ruled out: each is taken to have a tenth of the mean count more. A
    classifier learns this as its bias; similarities to prototypes have none. Not in the paper.

    Args:
        counts: images of each class on the device, (C,).
    """
    total = counts.sum()
    return (counts + torch.where(total > 0, total, torch.ones_like(total)) / (10 * counts.shape[0])).log()


def contrast(settings: "FedPCL", tensors: Tensors, projection: Tensor, num_classes: int) -> Tensor:
    """Return the loss of a batch, () (eq. 8 to 10).

    A class that nobody has is in no denominator. A sample whose class nobody has, or whose class is the only one
    that anybody has, adds 0.

    Args:
        settings: which terms, the temperature, what is in the denominator, and whether there is a prior.
        tensors: `labels`, `prototypes` and `present`, `index` unless only the global term counts, and
            `class_counts` with a prior.
        projection: (n, D).
        num_classes: C.
    """
    same = one_hot(tensors["labels"], num_classes)
    rivals = ~same & (tensors["present"] > 0)
    counted = rivals.any(dim=1) & (same & (tensors["present"] > 0)).any(dim=1)
    sets = _sets(settings, tensors, num_classes)
    prototypes = tensors["prototypes"][sets.reshape(-1)]
    logits = (projection @ prototypes.T / settings.tau).reshape(-1, sets.shape[0], num_classes)
    if settings.prior:
        logits = logits + log_prior(tensors[_PRIOR])
    against = rivals | same if settings.loss == "cross_entropy" else rivals
    own = torch.where(same[:, None], logits, 0.0).sum(dim=2)
    losses = (log_sum_exp(logits, against[:, None]) - own) * counted[:, None]
    return (losses @ _weights(settings, logits.detach())).mean()


def _sets(settings: "FedPCL", tensors: Tensors, num_classes: int) -> Tensor:
    """Rows of the prototypes of each set to contrast with, (s, C): the global ones, all devices', or both."""
    everybody = torch.arange(num_classes)[None]
    if settings.variant == "global":
        return everybody
    if settings.variant == "local":
        return tensors["index"]
    return torch.cat([everybody, tensors["index"]])


def _weights(settings: "FedPCL", logits: Tensor) -> Tensor:
    """Weight of each set's loss, (s,): L_g counts as much as all that L_p is the mean of (eq. 8)."""
    every = torch.ones_like(logits[0, :, 0])
    if settings.variant != "both":
        return every / every.sum()
    return torch.cat([every[:1], every[1:] / every[1:].sum()])


def _step(
    settings: "FedPCL", tensors: Tensors, loss: Callable[[Tensors, Tensor], Tensor]
) -> dict[str, Tensor]:
    """One step of Adam, as `torch.optim.Adam` takes it.

    The gradient of the weight is written out, as tiles of their own: autograd's would be in one piece.
    """
    inputs = standardized(tensors)
    weight, bias = tensors["weight"], tensors["bias"]
    values = torch.addmm(bias, inputs, weight.flatten(0, 1).T)
    slope, value = torch.func.grad_and_value(lambda values: loss(tensors, values))(values)
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
    """Kingma, Ba, "Adam", ICLR 2015, algorithm 1, with as few passes over the tensors as there can be.

    The state holds decaying sums of the gradients and of their squares; that they are not yet means, and the
    correction of their bias, is left to two scalars.
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
    """Logits: similarity to the device's own prototypes, padded with the global ones (section 4, eq. 7)."""
    own = tensors["local_counts"] > 0
    prototypes = torch.where(own[:, None], tensors["local_prototypes"], tensors["prototypes"][:num_classes])
    similarity = projected(settings, hidden(tensors)) @ prototypes.T / settings.tau
    if settings.prior:
        similarity = similarity + log_prior(tensors["local_counts"])
    logits = torch.where(own | (tensors["present"] > 0), similarity, ABSENT_LOGIT)
    return {"logits": logits, "probabilities": logits.softmax(dim=1)}
