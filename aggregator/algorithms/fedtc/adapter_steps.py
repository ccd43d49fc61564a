"""The steps that train FedTC's adapter and head (Table 5) with PyTorch, in one process or in several together."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.adamw import adamw

from aggregator.algorithms.algorithm import ABSENT_LOGIT
from aggregator.algorithms.fedtc.recipe import Recipe
from protocol.errors import ProtofleetError


def torch_device(configured: str) -> str:
    """Return the device to train on; `auto` is CUDA if available.

    Raises:
        ProtofleetError: a CUDA device is configured and there is none.
    """
    if configured == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if configured.startswith("cuda") and not torch.cuda.is_available():
        raise ProtofleetError(
            f'training.device is "{configured}", but PyTorch finds no CUDA device: use "auto"'
        )
    return configured


class Head(nn.Module):
    """The paper's adapter and head (Table 5): features (n, L) to logits (n, C)."""

    def __init__(self, *, feature_size: int, num_classes: int) -> None:
        super().__init__()
        sizes = (feature_size, 1024, 512, num_classes)
        self.layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
        self.registered = nn.ModuleList(self.layers)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits; rows of zeros stay zero instead of NaN."""
        *adapter, classifier = self.layers
        for layer in adapter:
            features = functional.normalize(functional.relu(layer(features)))
        logits: Tensor = classifier(features)
        return logits


@dataclass(frozen=True)
class SortedPrototypes:
    """Prototypes ordered by class: a class center plus a deviation is a feature to train on.

    Attributes:
        centers: (C, L), one per class; zeros for a class without prototypes.
        deviations: (m, L).
        labels: (m,), ascending.
        first: (C,), where a class begins among the prototypes.
        sizes: (C,), prototypes per class.
        in_file: the deviations are in a file, where they stay: only the features of a step are on the device.
    """

    centers: Tensor
    deviations: Tensor
    labels: Tensor
    first: Tensor
    sizes: Tensor
    in_file: bool = False

    def on(self, device: str) -> "SortedPrototypes":
        """Return the tensors on a device."""
        if self.in_file:
            return self
        names = ("centers", "deviations", "labels", "first", "sizes")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True)
class Share:
    """The rows of each step that a process computes: `index`, `index + number`, ... of `number` processes."""

    index: int = 0
    number: int = 1
    add: Callable[[Tensor], None] = lambda _: None
    """Replaces a tensor by the sum of those of all processes."""


@dataclass(frozen=True)
class _Draws:
    """Random numbers of an epoch or a step.

    Attributes:
        members: (n,), numbers of prototypes.
        angles: (n, 1), between 0 and 1, to mix with another prototype; None to mix none.
        partners: (n,), large numbers that choose it.
    """

    members: Tensor
    angles: Tensor | None = None
    partners: Tensor | None = None

    def _parts(self) -> list[Tensor]:
        return [each for each in (self.members, self.angles, self.partners) if each is not None]

    def split(self, size: int) -> "Iterator[_Draws]":
        """Yield the parts of the steps."""
        parts = [torch.split(each, size) for each in self._parts()]
        return itertools.starmap(_Draws, zip(*parts, strict=True))

    def of(self, share: Share) -> "_Draws":
        """Return a share of a step."""
        return _Draws(*(each[share.index :: share.number] for each in self._parts()))


class AdapterTraining:
    """A head in training, epoch by epoch: its state continues the training in another process.

    All processes draw the same random numbers, so that together they take the steps of one process, except for the
    rounding of sums. On the CPU, the same input in the same order, the same seed and as many processes and threads give
    the same head.

    Raises:
        ProtofleetError: a CUDA device is configured and there is none.
    """

    def __init__(
        self,
        data: SortedPrototypes,
        *,
        recipe: Recipe,
        seed: int,
        device: str,
        share: Share = Share(),
    ) -> None:
        self.device = torch_device(device)
        self.head = _first_head(data, seed).to(self.device)
        self.done = 0
        batches = math.ceil(len(data.labels) / recipe.batch_size)
        self.epochs = max(recipe.epochs, math.ceil(recipe.min_steps / batches))
        self._data, self._recipe, self._share, self._batches = data.on(self.device), recipe, share, batches
        self._generator = torch.Generator().manual_seed(seed)
        self._optimizer = _Optimizer(self.head, recipe)

    def epoch(self) -> dict[str, Any]:
        """Take the steps of the next epoch; return its `device`, `epoch` from 1, `epochs` and mean `loss`."""
        data, device = self._data, torch.device(self.device)
        total = torch.zeros((), device=device)
        draws = _draws(data, self._recipe, self._generator).split(self._recipe.batch_size)
        for batch, draw in enumerate(draws):
            mine = draw.of(self._share)
            logits = self.head(_features(data, mine).to(device))
            labels = data.labels[mine.members].to(device)
            batch_loss = functional.cross_entropy(logits, labels, reduction="sum")
            torch.autograd.backward(batch_loss / len(draw.members))
            rate = self._recipe.rate_at((self.done + batch / self._batches) / self.epochs)
            self._optimizer.step(self._recipe.learning_rate * rate, self._share)
            total += batch_loss.detach()
        self._share.add(total)
        self.done += 1
        loss = total.item() / len(data.labels)
        return {"device": device.type, "epoch": self.done, "epochs": self.epochs, "loss": loss}

    def state(self) -> list[NDArray[np.generic]]:
        """Return what another process needs to continue after the last epoch."""
        tensors = [each.detach().cpu().numpy().copy() for each in self._optimizer.tensors()]
        return [np.array(self.done), self._generator.get_state().numpy(), *tensors]

    @torch.no_grad()
    def restore(self, state: Sequence[NDArray[np.generic]]) -> None:
        """Continue with a state of the same training."""
        self.done = int(state[0])
        self._generator.set_state(torch.as_tensor(state[1].copy()))
        for tensor, array in zip(self._optimizer.tensors(), state[2:], strict=True):
            tensor.copy_(torch.as_tensor(array.copy()))


def _first_head(data: SortedPrototypes, seed: int) -> Head:
    """Initialize a head on the CPU, so that every device starts from the same one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Head(feature_size=data.centers.shape[1], num_classes=len(data.sizes))
    absent = data.sizes == 0
    with torch.no_grad():
        head.layers[-1].weight[absent] = 0.0
        head.layers[-1].bias[absent] = ABSENT_LOGIT
    return head


class _Optimizer:
    """Takes steps.

    An object of `torch.optim.Optimizer` would import PyTorch's compiler, which takes as long as PyTorch.
    """

    def __init__(self, head: Head, recipe: Recipe) -> None:
        self.parameters: list[Tensor] = list(head.parameters())
        self._is_sgd = recipe.optimizer == "sgd"
        self._averages, self._squares = ([torch.zeros_like(each) for each in self.parameters] for _ in "12")
        self._steps = [torch.zeros((), device=each.device) for each in self.parameters]

    def tensors(self) -> list[Tensor]:
        """Return all that steps change."""
        return [*self.parameters, *self._averages, *self._squares, *self._steps]

    @torch.no_grad()
    def step(self, rate: float, share: Share) -> None:
        """Take a step at a learning rate with the gradients of all shares, and delete them."""
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        if share.number > 1:
            every = torch.cat([each.flatten() for each in gradients])
            share.add(every)
            parts = torch.split(every, [each.numel() for each in gradients])
            gradients = [part.view_as(each) for part, each in zip(parts, gradients, strict=True)]
        if self._is_sgd:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=rate)
        else:
            adamw(
                self.parameters,
                gradients,
                self._averages,
                self._squares,
                [],
                self._steps,
                fused=True,
                amsgrad=False,
                lr=rate,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                weight_decay=0.01,
                maximize=False,
            )
        for parameter in self.parameters:
            parameter.grad = None


def _draws(data: SortedPrototypes, recipe: Recipe, generator: torch.Generator) -> _Draws:
    """Draw an epoch's random numbers on the CPU, the same for every device, and move them to the data at once."""
    order = torch.randperm(len(data.labels), generator=generator)
    angles, partners = [], []
    for members in torch.split(order, recipe.batch_size) if recipe.mix else ():
        angles.append(torch.rand(len(members), 1, generator=generator))
        partners.append(torch.randint(2**62, (len(members),), generator=generator))
    device = data.labels.device
    if not recipe.mix:
        return _Draws(order.to(device))
    return _Draws(order.to(device), torch.cat(angles).to(device), torch.cat(partners).to(device))


def _features(data: SortedPrototypes, draw: _Draws) -> Tensor:
    """Return a step's features, (b, L).

    Mixed, each deviation d becomes cos(t) d + sin(t) d', with d' that of a random prototype of the same class and t
    random: another point of the class, with the class's variance.
    """
    labels = data.labels[draw.members]
    deviations = data.deviations[draw.members]
    if draw.angles is not None and draw.partners is not None:
        angle = draw.angles * (math.pi / 2)
        partners = data.first[labels] + draw.partners % data.sizes[labels]
        deviations = torch.cos(angle) * deviations + torch.sin(angle) * data.deviations[partners]
    return data.centers[labels] + deviations
