"""`python -m research tune-flower`: settings of Flower's clients, by the app's own functions, on validation images."""

from collections.abc import Iterator

import click
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.data.images import NAMES
from benchmarks.fleet.flower.app.flower_app.task import Head, train
from benchmarks.fleet.flower.command import clients_of
from benchmarks.fleet.flower.fleets import Setting
from benchmarks.report import Table
from protofleet.simulation.fleet import Features

GRID = (
    *(Setting(learning_rate=rate, epochs=1) for rate in (0.03, 0.1, 0.3, 1.0)),
    *(Setting(learning_rate=rate, epochs=3) for rate in (0.1, 0.3)),
    *(Setting(learning_rate=rate, epochs=3, mu=0.01) for rate in (0.1, 0.3)),
    Setting(learning_rate=0.1, epochs=1, mu=0.1),
)


@click.command("tune-flower")
@click.option("--data", type=click.Choice(NAMES), default="fashion_mnist", show_default=True)
@click.option("--images", type=click.IntRange(min=1), help="Training images of all clients.  [default: all]")
@click.option("--rounds", type=click.IntRange(min=1), default=25, show_default=True)
def command(*, data: str, images: int | None, rounds: int) -> None:
    """Show the accuracy of each setting of Flower's clients on validation images, at its best and at the end."""
    features, owners, _ = clients_of(data, images, validation=True)
    columns = {"learning rate": ">14g", "epochs": ">8", "mu": ">8g", "best": ">8.2%", "last": ">8.2%"}
    table = Table(columns, title=f"{data}, {len(owners):,} training images, {rounds} rounds")
    for setting in GRID:
        reached = list(accuracies(features, owners, setting, rounds=rounds))
        table.row(setting.learning_rate, setting.epochs, setting.mu, max(reached), reached[-1])


def accuracies(
    features: Features, owners: NDArray[np.int64], setting: Setting, *, rounds: int
) -> Iterator[float]:
    """Yield the accuracy of each round's head: the average of the clients' heads, weighted by their images."""
    torch.manual_seed(0)
    head = Head(features.train.shape[1], features.classes)
    parts = [
        (torch.from_numpy(features.train[mine]), torch.from_numpy(features.train_labels[mine]))
        for mine in (owners == client for client in np.unique(owners))
    ]
    test, truth = torch.from_numpy(features.test), torch.from_numpy(features.test_labels)
    for number in range(1, rounds + 1):
        before = {name: values.clone() for name, values in head.state_dict().items()}
        total = {name: torch.zeros_like(values) for name, values in before.items()}
        for mine, labels in parts:
            head.load_state_dict(before)
            train(
                head,
                mine,
                labels,
                learning_rate=setting.learning_rate,
                epochs=setting.epochs,
                mu=setting.mu,
                seed=number,
            )
            for name, values in head.state_dict().items():
                total[name] += values * (len(labels) / len(owners))
        head.load_state_dict(total)
        with torch.no_grad():
            yield float((head(test).argmax(1) == truth).float().mean())
