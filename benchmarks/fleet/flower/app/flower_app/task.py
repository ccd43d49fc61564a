"""Model and local training of a Flower client. Needs PyTorch alone, so that settings can be tuned without Flower."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH = 32
MOMENTUM = 0.9


class Head(nn.Module):
    """FedTC's adapter and head: features (n, L) to logits (n, C)."""

    def __init__(self, feature_size: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(feature_size, 1024)
        self.second = nn.Linear(1024, 512)
        self.last = nn.Linear(512, classes)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits."""
        for layer in (self.first, self.second):
            features = functional.normalize(functional.relu(layer(features)))
        logits: Tensor = self.last(features)
        return logits


def train(
    head: Head,
    features: Tensor,
    labels: Tensor,
    *,
    learning_rate: float,
    epochs: int,
    mu: float = 0.0,
    seed: int = 0,
) -> None:
    """Train a head in place: SGD with momentum on cross-entropy, with FedProx's term mu / 2 |w - w0|^2.

    The steps are those of `torch.optim.SGD`, whose import takes as long as PyTorch's.
    """
    parameters = list(head.parameters())
    start = [each.detach().clone() for each in parameters]
    velocities = [torch.zeros_like(each) for each in parameters]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for members in torch.split(torch.randperm(len(labels), generator=generator), BATCH):
            loss = functional.cross_entropy(head(features[members]), labels[members])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for weights, first, velocity, gradient in zip(
                    parameters, start, velocities, gradients, strict=True
                ):
                    velocity.mul_(MOMENTUM).add_(gradient)
                    if mu:
                        velocity.add_(weights - first, alpha=mu)
                    weights.sub_(velocity, alpha=learning_rate)
