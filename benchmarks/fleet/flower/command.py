"""`python -m benchmarks fleet flower`: this fleet and Flower's, with real processes, on the same features and head."""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.data.features import backbone_file, load_features, prepared
from benchmarks.data.images import NAMES, load_data
from benchmarks.fleet.flower.fleets import Outcome, Setting, flower_programs, run_flower, run_ours
from benchmarks.report import Plot, Table, json_option, write_json
from protofleet.simulation.fleet import Features
from protofleet.simulation.partitions import Partition, share_out

BACKBONE, IMAGE_SIZE, CLIENTS = "mobilenetv2_100", 96, 10
PARTITION = Partition("dirichlet", 0.1)
STATISTICS = 'algorithm = "statistics"\n[client]\nbatch_size = 1\nmin_images = 1\n'
OURS: Mapping[str, str] = {
    "protofleet, FedTC": "",
    "protofleet, statistics": STATISTICS,
    "protofleet, statistics, no bound": f"{STATISTICS}[robust]\nmax_multiple = 0\n",
}
"""Settings of the task file for each method."""

SETTINGS: Mapping[str, Setting] = {
    "Flower, FedAvg": Setting(learning_rate=0.1, epochs=3),
    "Flower, FedProx": Setting(learning_rate=0.1, epochs=3, mu=0.01),
}
"""The best of `research tune-flower --images 6000 --rounds 10`, on 3,000 validation images."""


@click.command("flower")
@click.option(
    "--flower",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("flower/bin"),
    show_default=True,
    help="Folder of Flower's programs, of a virtual environment with flwr, torch and numpy.",
)
@click.option("--data", type=click.Choice(NAMES), default="fashion_mnist", show_default=True)
@click.option("--images", type=click.IntRange(min=1), help="Training images of all clients.  [default: all]")
@click.option("--rounds", type=click.IntRange(min=1), default=25, show_default=True, help="Of Flower.")
@json_option
def command(
    *,
    flower: Path,
    data: str,
    images: int | None,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Compare a fleet with Flower's FedAvg and FedProx: accuracy, time, bytes, memory and processor time."""
    programs = flower_programs(flower)
    features, owners, rows = clients_of(data, images)
    title = (
        f"{data}, {len(rows):,} training images, {len(np.unique(owners))} clients with images, {PARTITION}"
    )
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pixels = load_data(data).train.images[rows]
        backbone = backbone_file(BACKBONE, image_size=IMAGE_SIZE)
        for number, (method, settings) in enumerate(OURS.items()):
            at = folder / f"ours-{number}"
            outcomes[method] = run_ours(at, backbone, features, pixels, owners, settings)
        for number, (method, setting) in enumerate(SETTINGS.items()):
            at = folder / f"flower-{number}"
            outcomes[method] = run_flower(programs, at, features, owners, setting, rounds=rounds)
    tables, plot = _report(outcomes, title)
    write_json(
        json_file,
        "flower",
        tables=tables,
        plots=[plot],
        settings={method: asdict(setting) for method, setting in SETTINGS.items()},
        runs={method: asdict(outcome) for method, outcome in outcomes.items()},
    )


def clients_of(
    data: str, images: int | None, *, validation: bool = False
) -> tuple[Features, NDArray[np.int64], NDArray[np.int64]]:
    """Return features, the client of each training image (n,), and which images these are (n,)."""
    loaded = load_features(data, backbone=BACKBONE, image_size=IMAGE_SIZE)
    features = prepared(loaded, root=False, validation=validation)
    rows = np.sort(np.random.default_rng(0).permutation(len(features.train))[:images])
    features = replace(features, train=features.train[rows], train_labels=features.train_labels[rows])
    owners = share_out(features.train_labels, PARTITION, clients=CLIENTS, rng=np.random.default_rng(0))
    return features, owners, rows


def _report(outcomes: Mapping[str, Outcome], title: str) -> tuple[list[Table], Plot]:
    """Print each fleet's accuracy, and its costs until it is within 0.5 points of its own best."""
    table = Table(
        {"": "<34", "last accuracy": ">15.2%", "of rounds": ">11", "best": ">8.2%",
         "rounds until there": ">19", "seconds": ">9.1f",
         "MB up": ">9.1f", "MB down": ">9.1f",
         "CPU s, clients": ">16.1f", "CPU s, server": ">15.1f", "MB of memory, a client": ">24.0f"},
        title=f"{title}; costs until 0.5 points below each one's best",
    )  # fmt: skip
    for method, outcome in outcomes.items():
        needed = outcome.needed()
        spent = outcome.rounds[needed - 1]
        reached = [each.accuracy for each in outcome.rounds]
        table.row(
            *(method, reached[-1], len(reached), max(reached), needed, spent.seconds),
            *(spent.bytes_up / 1e6, spent.bytes_down / 1e6, spent.clients_cpu_s, spent.server_cpu_s),
            np.median(outcome.client_memory_bytes) / 1e6,
        )
    lines = {
        method: [(each.seconds, 100 * each.accuracy) for each in outcome.rounds]
        for method, outcome in outcomes.items()
    }
    return [table], Plot(
        title="Accuracy of each round", x="seconds", y="test accuracy, %", series=lines, log=("x",)
    )
