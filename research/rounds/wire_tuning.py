"""`python -m research tune-wire`: settings of the rivals of `benchmarks accuracy wire`, on validation images."""

from dataclasses import replace

import click

from benchmarks.accuracy.wire import rivals
from benchmarks.accuracy.wire.command import fleet_of, loaded
from benchmarks.accuracy.wire.methods import LAYERS, LINEAR, linear_head
from benchmarks.data.images import NAMES
from benchmarks.report import Table

ROUNDS = 30
LINEAR_GRID = tuple(
    replace(LINEAR, learning_rate=rate, epochs=epochs)
    for rate in (0.001, 0.003, 0.01, 0.03)
    for epochs in (1, 5)
)
MOMENTUM_GRID = tuple(
    replace(rivals.MOMENTUM, learning_rate=rate, calibrated=calibrated)
    for rate in (0.001, 0.003, 0.01, 0.03)
    for calibrated in (False, True)
)
SHRINKAGES = (0.03, 0.1, 0.3, 1.0, 3.0)
"""FedCOF's gamma, relative to the mean square of the means' values."""

RIDGES, WIDTHS = (0.001, 0.01, 0.1, 1.0), (0.5, 1.0, 2.0)
"""Fed3R-RF's lambda, and the width of its Gaussian kernel for rows of length 1."""


@click.command("tune-wire")
@click.option("--data", type=click.Choice(NAMES), default="fashion_mnist", show_default=True)
@click.option("--images", type=click.IntRange(min=1), help="Training images of all devices.  [default: all]")
def command(*, data: str, images: int | None) -> None:
    """Show the accuracy of every candidate of the rivals' settings on validation images."""
    fleet = fleet_of(loaded(data, validation=True), images, 0, max_multiple=0.0)
    table = Table({"method": "<30", "layers": "<12", "setting": "<44", "validation": ">12.2%"})
    for recipe in LINEAR_GRID:
        (point,) = linear_head(fleet, rounds=(ROUNDS,), recipe=recipe)
        setting = f"learning rate {recipe.learning_rate:g}, {recipe.epochs} epochs"
        table.row("FedAvg", "", setting, point.accuracy)
    for layers in ("", *LAYERS.values()):
        for recipe in MOMENTUM_GRID:
            (point,) = rivals.momentum_head(fleet, rounds=(ROUNDS,), layers=layers, recipe=recipe)
            calibrated = ", calibrated" if recipe.calibrated else ""
            setting = f"learning rate {recipe.learning_rate:g}{calibrated}"
            table.row("FedAvg, momentum", layers, setting, point.accuracy)
        for group in rivals.GROUPS:
            for shrinkage in SHRINKAGES:
                (point,) = rivals.fedcof(fleet, group=group, shrinkage=shrinkage, layers=layers)
                table.row(f"FedCOF, {point.setting}", layers, f"shrinkage {shrinkage:g}", point.accuracy)
    for width in WIDTHS:
        points = rivals.fed3r_rf(fleet, ridges=RIDGES, width=width, number=rivals.RANDOM_FEATURES)
        for ridge, point in zip(RIDGES, points, strict=True):
            table.row("Fed3R-RF", "", f"width {width:g}, ridge {ridge:g}", point.accuracy)
