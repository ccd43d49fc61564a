"""A comparison of backbones as lines of text, as JSON and as a plot."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aggregator.status.forecast import Forecast, forecasts
from aggregator.status.heads import Confusion
from aggregator.status.render import confused_text, forecast_text
from protocol.cli import counted
from protocol.models.onnx_metadata import BackboneMetadata
from protofleet.simulation.compare import Comparison, Row
from protofleet.simulation.cross_validation import LEVEL, LOGISTIC, NEAREST_MEAN, Estimate, Evaluation

SMALLER = 0.95
"""Share of the file's bytes from which on another export is worth its while."""


def lines(made: Comparison) -> list[str]:
    """Return the lines of the report."""
    first = made.rows[0].evaluations[made.algorithm].accuracy
    amounts = (
        counted(len(made.data.labels), "image"),
        counted(len(made.data.classes), "class", "classes"),
        f"{first.folds} folds",
        counted(len(first.values) // first.folds, "draw"),
    )
    return [
        ", ".join(amounts),
        f"accuracy: in %, ± half of the {LEVEL:.0%} interval; {NEAREST_MEAN}, {LOGISTIC}: of all images in one place",
        f"kB up: of one device, {made.algorithm}; MB: of a backbone that ends with the last block used",
        "ms: processor time of that backbone for one image, on this machine",
        *(f"B{number}: {file}" for number, file in enumerate(made.backbones, 1) if len(made.backbones) > 1),
        "",
        *_table(made),
        "",
        *_reasons(made),
        *_instructions(made.recommended, made.backbones),
    ]


def _table(made: Comparison) -> list[str]:
    """Return the lines of the candidates."""
    classifiers = list(made.rows[0].evaluations)
    width = max(len("features"), *(len(row.candidate.name) for row in made.rows)) + 2
    heads = "".join(f"{name:>15}" for name in classifiers)
    lines = [f"  {'features':<{width}}{'values':>6}{heads}{'kB up':>9}{'MB':>7}{'ms':>8}"]
    for row in made.rows:
        cells = "".join(f"{_points(row.evaluations[name].accuracy):>15}" for name in classifiers)
        mark, name = "*" if row is made.recommended else " ", row.candidate.name
        lines.append(
            f"{mark} {name:<{width}}{len(row.candidate.columns):>6}{cells}"
            f"{row.evaluations[made.algorithm].up_bytes / 1e3:>9,.1f}{row.cost.backbone_bytes / 1e6:>7.1f}"
            f"{row.cost.milliseconds:>8.2f}"
        )
    return lines


def _points(found: Estimate) -> str:
    """Return an accuracy, or a difference of two, in % with its margin."""
    return f"{100 * found.mean:.1f} ± {100 * found.margin:.1f}"


def _reasons(made: Comparison) -> Iterator[str]:
    """Yield the recommendation and why."""
    chosen, best = made.recommended, made.best
    if chosen is best:
        reason = (
            f"the greatest accuracy with {made.algorithm}, and nothing cheaper is within one standard error"
        )
        if len(made.rows) == 1:
            reason = "the only candidate: a file that was exported with --layers all has more"
    else:
        behind = best.accuracy(made.algorithm).minus(chosen.accuracy(made.algorithm))
        reason = (
            f"the fewest kB within one standard error of the greatest accuracy with {made.algorithm} "
            f"({best.candidate.name}: {100 * behind.mean:.1f} points more, standard error {100 * behind.error:.1f})"
        )
    yield f"recommended: {chosen.candidate.name}, {reason}"
    for name, found in made.first_draw.items():
        if name != made.algorithm:
            gain = found.accuracy.minus(made.first_draw[made.algorithm].accuracy)
            yield (
                f"  {name} with these features, on the first draw: {_points(gain)} points against {made.algorithm}, "
                f"{found.up_bytes / 1e3:,.1f} kB up"
            )
    if confused := _confused(made):
        yield f"  confused: {confused_text(confused)}"
    yield f"  forecast: {forecast_text(_forecast(made))}"


def _confused(made: Comparison) -> list[Confusion]:
    """Return the pairs of classes that the recommended features confuse, the most often confused first."""
    found, classes = made.recommended.evaluations[made.algorithm].found, made.data.classes
    wrong = found - np.diag(np.diag(found))
    return [
        Confusion(
            label=classes[label],
            predicted=classes[predicted],
            images=int(wrong[label, predicted]),
            of=int(found[label].sum()),
        )
        for label, predicted in zip(
            *np.unravel_index(np.argsort(-wrong, axis=None), wrong.shape), strict=True
        )
        if wrong[label, predicted]
    ]


def _forecast(made: Comparison) -> list[Forecast]:
    """Return what twice as many images should bring the recommended features, as `aggregator status` does."""
    found = made.recommended.evaluations[made.algorithm].found
    correct = np.diag(found)
    wrong = found.sum(axis=1) - correct
    return list(forecasts(made.data.classes, list(zip(correct.tolist(), wrong.tolist(), strict=True))))


def _instructions(row: Row, backbones: Mapping[Path, BackboneMetadata]) -> Iterator[str]:
    """Yield what the task file needs for a candidate, and how a smaller backbone is exported."""
    files = list(backbones)
    used = {files[number]: blocks for number, blocks in row.candidate.parts}
    if len(files) > 1:
        yield f"  in the task file: backbones = {_listed([str(file) for file in used])}"
    names = list(dict.fromkeys(name for blocks in used.values() for name in blocks))
    known = {file: [block.name for block in backbones[file].blocks or ()] for file in used}
    is_selectable = all(
        {name for name in names if name in known[file]} == set(blocks) for file, blocks in used.items()
    )
    if is_selectable and any(set(known[file]) != set(blocks) for file, blocks in used.items()):
        yield f"  in the task file: layers = {_listed(names)}"
    sizes = sum(file.stat().st_size for file in used)
    if not is_selectable or (names and row.cost.backbone_bytes < SMALLER * sizes):
        for file, blocks in used.items():
            yield (
                f"  {'or, for' if is_selectable else 'for'} {row.cost.backbone_bytes / 1e6:.1f} MB instead of "
                f"{sizes / 1e6:.1f}: export-backbone {backbones[file].model} --layers {','.join(blocks)}, "
                f"with the other options that made {file.name}"
            )


def _listed(names: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def as_dict(made: Comparison) -> dict[str, Any]:
    """Return everything as numbers, texts and lists, for JSON."""
    files = list(made.backbones)
    return {
        "images": len(made.data.labels),
        "classes": made.data.classes,
        "algorithm": made.algorithm,
        "candidates": [
            {
                "name": row.candidate.name,
                "parts": [
                    {"backbone": str(files[number]), "layers": list(blocks)}
                    for number, blocks in row.candidate.parts
                ],
                "values": len(row.candidate.columns),
                "backbone_bytes": row.cost.backbone_bytes,
                "milliseconds": row.cost.milliseconds,
                "results": _results(row.evaluations),
            }
            for row in made.rows
        ],
        "best": made.best.candidate.name,
        "recommended": made.recommended.candidate.name,
        "first_draw": _results(made.first_draw),
        "confused": msgspec.to_builtins(_confused(made)),
        "forecast": msgspec.to_builtins(_forecast(made)),
    }


def _results(evaluations: Mapping[str, Evaluation]) -> dict[str, Any]:
    return {
        name: {
            "accuracy": found.accuracy.mean,
            "margin": found.accuracy.margin,
            "folds": found.accuracy.values.tolist(),
            "up_bytes": found.up_bytes,
        }
        for name, found in evaluations.items()
    }


def draw(made: Comparison, file: Path) -> None:
    """Write a plot of accuracy over bytes and over time, with the front of candidates that no other one dominates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    costs = {
        "kB up, of a device": [row.evaluations[made.algorithm].up_bytes / 1e3 for row in made.rows],
        "ms an image": [row.cost.milliseconds for row in made.rows],
    }
    for axes, (label, cost) in zip(panels, costs.items(), strict=True):
        points = sorted(
            (x, -100 * row.accuracy(made.algorithm).mean) for x, row in zip(cost, made.rows, strict=True)
        )
        greatest = np.minimum.accumulate([minus for _, minus in points])
        axes.step([x for x, _ in points], -greatest, where="post", color="0.7")
        for x, row in zip(cost, made.rows, strict=True):
            found, color = row.accuracy(made.algorithm), "C3" if row is made.recommended else "C0"
            at = (x, 100 * found.mean)
            axes.errorbar(*at, yerr=100 * found.margin, fmt="o", color=color, elinewidth=0.5)
            axes.annotate(row.candidate.name, at, xytext=(4, 4), textcoords="offset points", fontsize=7)
        axes.set_xlabel(label)
    lowest, highest = panels[0].get_ylim()
    panels[0].set_ylim(max(lowest, 0), min(highest, 100))  # intervals of few folds are wider
    panels[0].set_ylabel(f"accuracy with {made.algorithm}, %")
    figure.savefig(file)
