"""`python -m research own-classes`: what `--prior auto` gains on a device's own classes and loses on all classes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.train_head import FedTC
from benchmarks.data.features import load_features
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from edge_client.heads.class_prior import FEWEST, WINDOW, Setting, adjusted, choose, label_shares
from protofleet.simulation import algorithms
from protofleet.simulation.fleet import Client, Features
from protofleet.simulation.partitions import Partition, parse_partition, share_out
from research.defaults.class_prior import probabilities_of


class DataSet(NamedTuple):
    """The features of a data set."""

    backbone: str
    image_size: int
    at_most: int | None


SETS = {
    "fashion_mnist": DataSet("mobilenetv2_100:c384,c576", 96, 6_000),
    "cifar10": DataSet("mobilenetv2_100:c384,c576", 96, 6_000),
    "pacs": DataSet("mobilenetv2_100:c576,c960", 224, None),
}

DEVICES, IMAGES = 10, 300
"""Devices, and images that each predicts one after the other."""

OWN = {"own": 1.0, "mixed": 0.8, "all": 0.0}
"""Share of the images that is drawn by the device's shares of the classes; the rest is of all classes alike."""

METHODS: dict[str, tuple[Setting, int]] = {
    "no prior": ("none", WINDOW), "estimated": ("images", WINDOW), "auto": ("auto", WINDOW),
    "auto, last 20": ("auto", FEWEST),
}  # fmt: skip
"""The setting, and the number of newest images by which it is chosen."""

COLUMNS = {
    "data": "<14", "devices": "<14", "classes": "<6", "alone": ">7.1%", "no prior": ">9.1%", "estimated": ">10.1%",
    "auto": ">7.1%", "auto, last 20": ">14.1%", "first 19": ">9.1%", "folder": ">7.1%", "worst change": ">13.1%",
}  # fmt: skip

Accuracies = dict[str, float]


@click.command("own-classes")
@repeated("--data", "names", type=click.Choice(list(SETS)), default=tuple(SETS), help="May be repeated.")
@click.option(
    "--partition", "partitions", default=("dirichlet:0.1", "sharding:2"), multiple=True, show_default=True,
    help="Of the devices' images; may be repeated.",
)  # fmt: skip
@repeated("--seed", "seeds", type=int, default=(0, 1, 2), help="May be repeated.")
@json_option
def command(
    *, names: tuple[str, ...], partitions: tuple[str, ...], seeds: tuple[int, ...], json_file: Path | None
) -> None:
    """Predict test images on ten devices with FedTC's head, one image after the other, as `edge-client watch` does.

    Predictions count from the 20th on; "first 19" are those before, and "folder" all at once, as in `edge-client
    predict`. "alone" is each device's own head. The worst change is that of a device, with `auto`.
    """
    table, runs = Table(COLUMNS, title=f"{DEVICES} devices, {IMAGES} images each"), []
    for name in names:
        data = SETS[name]
        features = load_features(
            name, backbone=data.backbone, image_size=data.image_size, at_most=data.at_most
        )
        for partition in map(parse_partition, partitions):
            found = [device for seed in seeds for device in run_fleet(features, partition, seed)]
            for classes in OWN:
                rows = [device[classes] for device in found]
                means = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
                worst = min(row["auto"] - row["no prior"] for row in rows)
                figures = (means[key] for key in list(COLUMNS)[3:-1])
                table.row(name, str(partition), classes, *figures, worst)
                runs.append({"data": name, "partition": str(partition), "classes": classes, "devices": rows})
    write_json(json_file, "own-classes", tables=[table], seeds=seeds, runs=runs)


def run_fleet(features: Features, partition: Partition, seed: int) -> Iterator[dict[str, Accuracies]]:
    """Yield, for each device with images, its accuracies for each of OWN."""
    rng = np.random.default_rng(seed)
    owners = share_out(features.train_labels, partition, clients=DEVICES, rng=rng)
    clients = [_client(features, owners == device) for device in np.unique(owners)]
    head = probabilities_of(algorithms.train_prototypes(FedTC(), clients).logits[0])
    alone = algorithms.train_alone(clients, classes=features.classes).logits
    for client, own_head in zip(clients, alone, strict=True):
        counts = np.bincount(client.train_labels, minlength=features.classes)
        labels = {str(label): int(count) for label, count in enumerate(counts)}
        shares = label_shares(list(labels), labels)
        yield {
            classes: _accuracies(
                head,
                own_head.argmax(axis=1),
                features.test_labels,
                _drawn(features, counts, own, rng),
                shares,
            )
            for classes, own in OWN.items()
        }


def _client(features: Features, members: NDArray[np.bool_]) -> Client:
    test, truth = features.test, features.test_labels
    weights = np.full(len(truth), 1 / len(truth))
    train, labels = features.train[members], features.train_labels[members]
    return Client(
        train, labels, test, truth, features.normalized, features.widths, domain="", weights=weights
    )


def _drawn(
    features: Features, counts: NDArray[np.int64], own: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return test images, (IMAGES,), in random order."""
    shares = own * counts / counts.sum() + (1 - own) / len(counts)
    labels = rng.choice(len(counts), IMAGES, p=shares)
    members = [np.flatnonzero(features.test_labels == label) for label in range(len(counts))]
    return np.array([rng.choice(members[label]) for label in labels])


def _accuracies(
    head: NDArray[np.float32],
    alone: NDArray[np.int64],
    truth: NDArray[np.int64],
    chosen: NDArray[np.int64],
    shares: NDArray[np.float64] | None,
) -> Accuracies:
    rows, labels = head[chosen], truth[chosen]
    correct = {
        name: predicted_one_by_one(rows, setting, shares, window=window) == labels
        for name, (setting, window) in METHODS.items()
    }
    at_once = _predicted(rows, rows, "auto", shares) == labels
    return {
        "alone": float((alone[chosen] == labels)[FEWEST - 1 :].mean()),
        **{name: float(each[FEWEST - 1 :].mean()) for name, each in correct.items()},
        "first 19": float(correct["auto"][: FEWEST - 1].mean()),
        "folder": float(at_once.mean()),
    }


def predicted_one_by_one(
    rows: NDArray[np.float32], setting: Setting, shares: NDArray[np.float64] | None, *, window: int
) -> NDArray[np.int64]:
    """Return the classes, (n,), of images with probabilities (n, C), of which each prior sees the last ones."""
    ends = range(1, len(rows) + 1)
    found: Sequence[NDArray[np.int64]] = [
        _predicted(rows[end - 1 : end], rows[max(0, end - window) : end], setting, shares) for end in ends
    ]
    return np.concatenate(found)


def _predicted(
    rows: NDArray[np.float32],
    sample: NDArray[np.float32],
    setting: Setting,
    shares: NDArray[np.float64] | None,
) -> NDArray[np.int64]:
    prior = choose(setting, sample, shares).shares
    found: NDArray[np.int64] = (rows if prior is None else adjusted(rows, prior)).argmax(axis=1)
    return found
