"""`python -m research restoration`: about what variance is restored, with devices in several domains."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.adapter import train_adapter
from aggregator.algorithms.fedtc.discriminant import discriminants
from aggregator.algorithms.fedtc.head import Dense, logits_of
from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.training_set import combine, pool
from benchmarks.data.domains import load_domains
from benchmarks.data.images import DIGITS
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from protocol.wire.quantization import dequantize, quantize
from protofleet.prototypes import average_class
from protofleet.simulation.fleet import Features

AT_MOST = 2000
"""Images of each part of a domain."""

CLASSES = 10

Images: TypeAlias = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Features (n, L) and classes (n,)."""

COLUMNS = {"B": "<4", "seed": ">6", "about": ">14", "adapter": ">9.2%", "LDA": ">9.2%"}
ADAPTER = replace(RECIPES["default"], closed_form=False)


@click.command("restoration")
@click.option("--devices", type=click.IntRange(min=1), default=3, show_default=True, help="In each domain.")
@repeated("--batch", "batches", type=click.IntRange(min=1), default=(5, 25))
@repeated("--seed", "seeds", type=int, default=(0, 1, 2, 3, 4))
@click.option("--validation", is_flag=True, help="Evaluate on a quarter of the training images instead.")
@json_option
def command(
    *,
    devices: int,
    batches: tuple[int, ...],
    seeds: tuple[int, ...],
    validation: bool,
    json_file: Path | None,
) -> None:
    """Train heads of four digit domains: prototypes as they are, and restored about the class or the device."""
    domains = load_domains(DIGITS, ["mobilenetv2_100"], image_size=96, at_most=AT_MOST)
    table = Table(
        COLUMNS, title=f"{', '.join(DIGITS)}: {devices} devices each, mean accuracy over the domains"
    )
    runs = []
    for batch in batches:
        for seed in seeds:
            trained, evaluated = _divide(domains, np.random.default_rng(seed), validation=validation)
            data = combine(_parts(trained, devices, batch, seed), num_classes=CLASSES)
            sets = {
                about: replace(
                    data,
                    restore=about != "as they are",
                    devices=data.devices if about == "device" else None,
                ).evenly_weighted()
                for about in ("as they are", "class", "device")
            }
            for about, each in sets.items():
                recipe = replace(ADAPTER, restore=each.restore, mix=each.restore)
                layers, _ = train_adapter(each, recipe=recipe, seed=seed, device="cpu")
                (linear,) = discriminants(each.centers, each.deviations, each.samples, (1.0,))
                accuracies = [
                    float(np.mean([_accuracy(head, domain) for domain in evaluated]))
                    for head in (layers, (linear,))
                ]
                table.row(f"{batch}", seed, about, *accuracies)
                runs.append({"batch": batch, "seed": seed, "about": about, "accuracies": accuracies})
    write_json(json_file, "restoration", devices=devices, validation=validation, runs=runs)


def _divide(
    domains: Mapping[str, Features], rng: np.random.Generator, *, validation: bool
) -> tuple[list[Images], list[Images]]:
    """Return the images of each domain that devices have, in random order, and those that heads are evaluated on."""
    trained, evaluated = [], []
    for domain in domains.values():
        order = rng.permutation(len(domain.train_labels))
        held_out = order[: len(order) // 4 if validation else 0]
        own = order[len(held_out) :]
        trained.append((domain.train[own], domain.train_labels[own]))
        tested = (domain.train[held_out], domain.train_labels[held_out])
        evaluated.append(tested if validation else (domain.test, domain.test_labels))
    return trained, evaluated


def _parts(trained: Sequence[Images], devices: int, batch: int, seed: int) -> list[Prototypes]:
    """Return the prototypes of each device, rounded as on the wire."""
    parts: list[Prototypes] = []
    for features, labels in trained:
        for rows in np.array_split(np.arange(len(labels)), devices):
            rng = np.random.default_rng([seed, len(parts)])
            of_class = []
            for label in np.unique(labels):
                values, counts = average_class(
                    features[rows][labels[rows] == label], batch=batch, rng=rng, alpha=0.99
                )
                of_class.append(Prototypes(values, np.full(len(counts), label), counts.astype(np.int64)))
            part = pool(of_class)
            parts.append(replace(part, values=dequantize(*quantize(part.values.astype(np.float16)))))
    return parts


def _accuracy(head: Sequence[Dense], images: Images) -> float:
    features, labels = images
    return float((logits_of(head, features).argmax(axis=1) == labels).mean())
