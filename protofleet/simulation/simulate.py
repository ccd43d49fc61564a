"""Simulated fleets: labeled images dealt out to devices, and what each algorithm makes of them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from aggregator.algorithms.algorithm import Algorithm, OneShot
from aggregator.algorithms.registry import ALGORITHMS as REGISTERED
from aggregator.algorithms.registry import find_algorithm
from aggregator.config.schema import Robust
from aggregator.training.robust.weights import Counting
from edge_client.heads.class_prior import smoothed
from protocol.errors import ConfigError
from protofleet.packages import needed_packages
from protofleet.simulation import algorithms as methods
from protofleet.simulation.algorithms import TINY, Trained
from protofleet.simulation.dataset import Dataset
from protofleet.simulation.engine import Engine, EngineName, running
from protofleet.simulation.fleet import Client
from protofleet.simulation.partitions import Partition, parse_partition, share_out

FEDTC, STATISTICS = "fedtc", "statistics"
ALONE, ALL_IMAGES = "alone", "all-images"

ALGORITHMS = (*REGISTERED, ALONE, ALL_IMAGES)
"""The algorithms of this package that can be simulated; `alone` is each device without the fleet, `all-images` training
on all images in one place."""

ONE_SHOT = tuple(name for name, kind in REGISTERED.items() if issubclass(kind, OneShot))

DEFAULT_ALGORITHMS = (*ONE_SHOT, ALONE, ALL_IMAGES)
"""Those that take seconds."""

WORST_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class AlgorithmResult:
    """The result of one algorithm.

    Attributes:
        algorithm: its name.
        accuracy: share of all held-out images that are classified correctly, mean over the devices' heads.
        device_accuracies: likewise of each device's own head on held-out images of its domain, in the mixture of
            classes that the device has, of a head of the fleet with the labels' prior where `--prior auto` uses it;
            NaN for a device of whose classes no image is held out.
        uploads: submissions of a device.
        up_bytes: bytes of all uploads of a device, mean over the devices.
        down_bytes: bytes of all downloads of a device, without the backbone.
        seconds: processor time of all devices and the aggregator, without backbones and the export of graphs.
        quarantined: devices that were omitted as outliers; empty in rounds, where none is quarantined.
        counting: how many images the head is made of, and the limits of devices; None in rounds and without a fleet.
    """

    algorithm: str
    accuracy: float
    device_accuracies: tuple[float, ...]
    uploads: int
    up_bytes: float
    down_bytes: float
    seconds: float
    quarantined: tuple[str, ...] = ()
    counting: Counting | None = None

    @property
    def device_mean(self) -> float:
        """Mean of `device_accuracies`."""
        return float(np.nanmean(self.device_accuracies))

    @property
    def device_worst(self) -> float:
        """Mean of the worst tenth of `device_accuracies`, at least of one device."""
        ordered = np.sort([each for each in self.device_accuracies if not math.isnan(each)])
        return float(ordered[: max(1, math.ceil(WORST_SHARE * len(ordered)))].mean())


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulated fleet and its results.

    Attributes:
        devices: number of devices.
        partition: how the images were dealt out.
        classes: the C class names.
        domains: the domain of each device.
        images: int64 (K, C), the images of each device and class.
        held_out: images that no device has, to evaluate heads on.
        backbone_bytes: size of the backbone's file, which each device downloads once; 0 if it is unknown.
        seed: of the division.
        results: one for each algorithm.
        skipped: algorithms that cannot take so many features, with the reason and what to do.
    """

    devices: int
    partition: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    images: NDArray[np.int64]
    held_out: int
    backbone_bytes: int
    seed: int
    results: tuple[AlgorithmResult, ...]
    skipped: Mapping[str, str]

    def __getitem__(self, algorithm: str) -> AlgorithmResult:
        """Return the result of an algorithm; raises KeyError if it was not simulated."""
        return {result.algorithm: result for result in self.results}[algorithm]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as numbers, texts and lists, for JSON; None in place of NaN."""
        results = [
            {
                **asdict(result),
                "device_mean": result.device_mean,
                "device_worst": result.device_worst,
                "device_accuracies": [
                    None if math.isnan(each) else each for each in result.device_accuracies
                ],
            }
            for result in self.results
        ]
        return {**vars(self), "images": self.images.tolist(), "results": results}


@needed_packages("simulate")
def simulate(
    data: Dataset,
    *,
    devices: int = 10,
    partition: str = "dirichlet:0.3",
    algorithms: Sequence[str | Algorithm] = DEFAULT_ALGORITHMS,
    held_out: float = 0.2,
    robust: Robust | None = None,
    seed: int = 0,
    engine: EngineName = "local",
    on_result: Callable[[AlgorithmResult], None] = lambda _: None,
) -> Simulation:
    """Deal the images of a dataset out to simulated devices, and report what each algorithm reaches.

    Devices and aggregator run their own functions and encode their own messages, without a network.
    All settings that are not arguments are the defaults of the task file.

    Args:
        data: what `load_dataset` returned, or a `Dataset` of arrays.
        devices: K; with several domains a device has images of one of them, and all have about the same number of
            devices.
        partition: `iid` for random images; `dirichlet:BETA` for shares of each class drawn from a Dirichlet
            distribution, the more unequal the smaller BETA; `sharding:N` for N classes on each device.
        algorithms: some of `ALGORITHMS` or of another package's, with their defaults, or instances with settings of
            their own.
        held_out: share of each class of each domain that no device gets.
        robust: the aggregator's protection against incorrect prototypes; None for its defaults.
        seed: of the images that are held out, and of their division.
        engine: `local` computes all devices in this process; `ray` computes shares of them as tasks of the Ray cluster
            at RAY_ADDRESS, or of one on this machine.
        on_result: called with each result as soon as there is one.

    Raises:
        ConfigError: an argument is out of range, there are too few images, or no algorithm can take so many features.
    """
    require_distinct([_name(each) for each in algorithms])
    chosen = [_configured(each) for each in algorithms]
    skipped = unsuitable(chosen, features=data.features.shape[1])
    suitable = [each for each in chosen if _name(each) not in skipped]
    if skipped and not suitable:
        raise ConfigError("; ".join(f"{name}: {reason}" for name, reason in skipped.items()))
    clients = deal_out(data, parse_partition(partition), devices=devices, held_out=held_out, seed=seed)
    results = []
    with running(engine) as run:
        for trained, name in _train(clients, len(data.classes), suitable, robust or Robust(), run):
            results.append(_result(name, trained, clients))
            on_result(results[-1])
    return Simulation(
        devices=devices,
        partition=partition,
        classes=data.classes,
        domains=tuple(client.domain for client in clients),
        images=np.array(
            [np.bincount(client.train_labels, minlength=len(data.classes)) for client in clients], np.int64
        ),
        held_out=len(clients[0].test_labels),
        backbone_bytes=data.backbone_bytes,
        seed=seed,
        results=tuple(results),
        skipped=skipped,
    )


def unsuitable(algorithms: Sequence[str | Algorithm], *, features: int) -> dict[str, str]:
    """Return the algorithms that cannot take so many features, with the reason and what to do."""
    reasons = {}
    for each in algorithms:
        method = _configured(each)
        if isinstance(method, OneShot):
            mapped = method.feature_map(features, seed=0, columns=(), normalized=False)
            try:
                if mapped is not None:
                    mapped.check_size()
            except ConfigError as error:
                reasons[method.name] = str(error)
    return reasons


def _configured(algorithm: str | Algorithm) -> str | Algorithm:
    """Return an algorithm with its defaults for its name; `alone` and `all-images` have no settings."""
    if isinstance(algorithm, Algorithm) or algorithm in (ALONE, ALL_IMAGES):
        return algorithm
    return find_algorithm(algorithm)()


def _name(algorithm: str | Algorithm) -> str:
    return algorithm if isinstance(algorithm, str) else algorithm.name


def require_distinct(names: Sequence[str]) -> None:
    """Raise ConfigError if two algorithms have one name, by which their results are told apart."""
    if len(set(names)) < len(names):
        raise ConfigError(
            f"several algorithms have one name: {', '.join(names)}; run one after the other, or give each a `name`"
        )


def deal_out(
    data: Dataset, partition: Partition, *, devices: int, held_out: float, seed: int
) -> list[Client]:
    """Return the clients of a fleet, all with the same held-out images.

    A client's weights are those of held-out images of its domain in its own mixture of classes; zeros if there are none
    of its classes.

    Raises:
        ConfigError: there are fewer devices than domains, no held-out images, or too few images for each device to have
            one.
    """
    if not 0 < held_out < 1:
        raise ConfigError(f"expected a held-out share between 0 and 1, got {held_out}")
    rng = np.random.default_rng(seed)
    kept_back = _held_out(data.domain_numbers * len(data.classes) + data.labels, held_out, rng)
    if not kept_back.any():
        raise ConfigError(
            f"no image is held out: a class needs {math.ceil(1 / held_out)} images at least, or a greater share"
        )
    return deal(data, partition, kept_back=kept_back, devices=devices, rng=rng)


def deal(
    data: Dataset,
    partition: Partition,
    *,
    kept_back: NDArray[np.bool_],
    devices: int,
    rng: np.random.Generator,
) -> list[Client]:
    """Return the clients of a fleet whose devices share the images that are not kept back, (n,), for evaluation.

    Raises:
        ConfigError: there are fewer devices than domains, more than images, or too few for the partition.
    """
    if not 1 <= devices <= len(data.labels) or devices < len(data.domains):
        raise ConfigError(
            f"expected {len(data.domains)} to {len(data.labels)} devices for {len(data.labels)} images in "
            f"{len(data.domains)} domains, got {devices}"
        )
    domain_of = data.domain_numbers
    test, test_labels = data.features[kept_back], data.labels[kept_back]
    clients = []
    for number, domain in enumerate(data.domains):
        rows = np.flatnonzero((domain_of == number) & ~kept_back)
        mine = len(range(number, devices, len(data.domains)))
        owners = share_out(data.labels[rows], partition, clients=mine, rng=rng)
        present = np.where(domain_of[kept_back] == number, test_labels, -1)
        for owner in range(mine):
            own = rows[owners == owner]
            clients.append(
                Client(
                    domain=domain,
                    train=data.features[own],
                    train_labels=data.labels[own],
                    test=test,
                    test_labels=test_labels,
                    weights=_weights(data.labels[own], present, len(data.classes)),
                    normalized=data.normalized,
                    widths=data.widths,
                    layers=data.layers,
                )
            )
    return clients


def _held_out(groups: NDArray[np.int64], share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Mark a share of each group, rounded down, (n,)."""
    marked = np.zeros(len(groups), np.bool_)
    for group in np.unique(groups):
        members = rng.permutation(np.flatnonzero(groups == group))
        marked[members[: int(share * len(members))]] = True
    return marked


def _weights(own: NDArray[np.int64], present: NDArray[np.int64], classes: int) -> NDArray[np.float64]:
    """Return the weight of each test image, (m,), by its class or -1, so that classes weigh as much as in `own`."""
    available = np.bincount(present[present >= 0], minlength=classes)
    of_class = np.append(np.bincount(own, minlength=classes) / np.maximum(available, 1), 0.0)
    weights: NDArray[np.float64] = of_class[present]
    return np.asarray(weights / max(weights.sum(), np.finfo(np.float64).tiny))


def _train(
    clients: Sequence[Client],
    classes: int,
    wanted: Sequence[str | Algorithm],
    robust: Robust,
    engine: Engine,
) -> Iterator[tuple[Trained, str]]:
    """Yield the result of each algorithm; only devices with images take part, and all are evaluated."""
    members = [client for client in clients if len(client.train_labels)]
    for each in wanted:
        if each == ALONE:
            yield methods.train_alone(members, classes=classes, engine=engine), ALONE
        elif each == ALL_IMAGES:
            yield methods.train_in_one_place(members), ALL_IMAGES
        elif isinstance(each, Algorithm):
            yield methods.train(each, members, classes=classes, robust=robust, engine=engine), each.name


def _own_accuracy(client: Client, logits: NDArray[np.float32], *, has_prior: bool) -> float:
    """Return the accuracy on the client's domain and mixture of classes; NaN if no such image is held out.

    With a prior, predictions are adjusted as by `edge-client predict` for many of these images.
    """
    if not client.weights.any():
        return math.nan
    if has_prior:
        counts = np.bincount(client.train_labels, minlength=logits.shape[1])
        shares, rows = smoothed(counts.astype(np.float64)), softmax(logits.astype(np.float64), axis=1)
        gain = client.weights @ np.log(np.maximum(rows @ shares * len(shares), TINY))
        logits = logits + np.log(shares) if gain > 0 else logits
    return client.accuracy(logits.argmax(axis=1))


def _result(name: str, trained: Trained, clients: Sequence[Client]) -> AlgorithmResult:
    numbers = [number for number, client in enumerate(clients) if len(client.train_labels)]
    everywhere, own = [], [math.nan] * len(clients)
    for number, logits in zip(numbers, trained.logits, strict=True):
        client, predicted = clients[number], logits.argmax(axis=1)
        everywhere.append(float((predicted == client.test_labels).mean()))
        own[number] = _own_accuracy(client, logits, has_prior=trained.is_shared)
    counting = trained.counting and replace(
        trained.counting,
        limited=tuple(
            (str(numbers[int(each)]) if each else "", text) for each, text in trained.counting.limited
        ),
    )
    cost = {key: getattr(trained, key) for key in ("uploads", "up_bytes", "down_bytes", "seconds")}
    return AlgorithmResult(
        algorithm=name,
        accuracy=float(np.mean(everywhere)),
        device_accuracies=tuple(own),
        quarantined=tuple(str(numbers[int(each)]) for each in trained.quarantined),
        counting=counting,
        **cost,
    )
