"""The settings of rivals on validation images: `python -m benchmarks accuracy wire --tune`."""

from benchmarks.accuracy.wire import rivals
from benchmarks.accuracy.wire.methods import LAYERS, LINEAR_GRID, Fleet, linear_head
from benchmarks.report import Table

ROUNDS = 30


def show_candidates(fleet: Fleet) -> None:
    """Print the accuracy of every candidate."""
    table = Table({"method": "<30", "layers": "<12", "setting": "<44", "validation": ">12.2%"})
    for recipe in LINEAR_GRID:
        (point,) = linear_head(fleet, rounds=(ROUNDS,), recipe=recipe)
        setting = f"learning rate {recipe.learning_rate:g}, {recipe.epochs} epochs"
        table.row("FedAvg", "", setting, point.accuracy)
    for layers in ("", *LAYERS.values()):
        for recipe in rivals.MOMENTUM_GRID:
            (point,) = rivals.momentum_head(fleet, rounds=(ROUNDS,), layers=layers, recipe=recipe)
            calibrated = ", calibrated" if recipe.calibrated else ""
            setting = f"learning rate {recipe.learning_rate:g}{calibrated}"
            table.row("FedAvg, momentum", layers, setting, point.accuracy)
        for group in rivals.GROUPS:
            for shrinkage in rivals.SHRINKAGES:
                (point,) = rivals.fedcof(fleet, group=group, shrinkage=shrinkage, layers=layers)
                table.row(f"FedCOF, {point.setting}", layers, f"shrinkage {shrinkage:g}", point.accuracy)
    for width in rivals.WIDTHS:
        points = rivals.fed3r_rf(fleet, ridges=rivals.RIDGES, width=width, number=rivals.RANDOM_FEATURES)
        for ridge, point in zip(rivals.RIDGES, points, strict=True):
            table.row("Fed3R-RF", "", f"width {width:g}, ridge {ridge:g}", point.accuracy)
