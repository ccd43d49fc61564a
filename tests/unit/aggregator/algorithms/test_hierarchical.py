"""Hierarchical Gaussian prototypes against plain formulas in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import ABSENT_LOGIT, Contribution
from aggregator.algorithms.hierarchical import Hierarchical, _nearest, _of_groups
from aggregator.graphs.tracing import to_torch
from aggregator.training.robust.rounds import robust_contributions

L, C = 6, 3
SETTINGS = Hierarchical(directions=2, prior=True)
FUNCTIONS = SETTINGS.functions(feature_size=L, num_classes=C, seed=0)
FIRST = SETTINGS.first_tensors(feature_size=L, num_classes=C, seed=0)

Floats = NDArray[np.float64]


def images(labels: list[int], *, seed: int, offset: float = 0.0) -> tuple[Floats, NDArray[np.int64]]:
    """Return features whose deviations within classes are 4, 2, 0.1, 0.1, 0.1 and 0.1, all of a device offset."""
    random = np.random.default_rng(seed)
    deviations = np.array([4, 2, 0.1, 0.1, 0.1, 0.1])
    owned = np.array(labels, dtype=np.int64)
    return 5 * np.eye(C, L)[owned] + offset + random.normal(size=(len(owned), L)) * deviations, owned


def covariance(features: Floats, labels: NDArray[np.int64]) -> Floats:
    """Return the covariance about class means, (L, L)."""
    away = features - np.stack([features[labels == label].mean(axis=0) for label in labels])
    found: Floats = away.T @ away / (len(labels) - len(np.unique(labels)))
    return found


def contribution(device: str, features: Floats, labels: NDArray[np.int64]) -> Contribution:
    """Return what a device uploads, with exact directions and unrounded."""
    squares, vectors = np.linalg.eigh(covariance(features, labels))
    factor = np.sqrt(squares[-2:])[:, None] * vectors[:, -2:].T
    owned, counts = np.unique(labels, return_counts=True)
    return Contribution(
        device=device,
        values=np.stack([features[labels == label].mean(axis=0) for label in owned]).astype(np.float32),
        labels=owned,
        counts=counts,
        tensors={
            "directions": (factor - FIRST["directions"]).astype(np.float32),
            "deviation": np.sqrt([squares.sum()]).astype(np.float32),
        },
    )


def test_directions_are_those_of_the_greatest_scatter_within_classes() -> None:
    """Few passes find them, each as long as its deviation; the loss is the share of the variance that they leave."""
    features, labels = images([0] * 20 + [1] * 10 + [2] * 10, seed=0)
    tensors = {
        **to_torch(FIRST), "feature": torch.from_numpy(features).float(), "labels": torch.from_numpy(labels)
    }  # fmt: skip
    for _ in range(SETTINGS.epochs):
        found = FUNCTIONS.step.apply(tensors)
        tensors["directions"] = found["next_directions"]
    squares, vectors = np.linalg.eigh(covariance(features, labels))
    expected = squares[-2:][::-1, None, None] * np.einsum("ij,kj->jik", vectors, vectors)[-2:][::-1]
    outer = torch.einsum("ri,rj->rij", tensors["directions"], tensors["directions"])
    np.testing.assert_allclose(outer.numpy(), expected, atol=2e-3 * squares[-1])
    assert float(found["next_deviation"]) ** 2 == pytest.approx(squares.sum(), rel=1e-5)
    assert float(found["loss"]) == pytest.approx(squares[:-2].sum() / squares.sum(), rel=0.05)


@pytest.mark.parametrize(("labels", "directions"), [([0], 0), ([0] * 4, 0), ([0] * 5, 1), ([0, 1] * 5, 2)])
def test_few_images_give_no_directions(labels: list[int], directions: int) -> None:
    """A direction needs four images beyond one of each class: the mean and the scatter of two give both away."""
    features, owned = images(labels, seed=1)
    found = FUNCTIONS.step.apply(
        {**to_torch(FIRST), "feature": torch.from_numpy(features).float(), "labels": torch.from_numpy(owned)}
    )
    assert int((found["next_directions"] != 0).any(dim=1).sum()) == directions
    assert bool(found["next_directions"].isfinite().all())


def test_head_is_a_shrunken_gaussian_discriminant() -> None:
    """Log-likelihoods with half the covariance, means between the device's and the fleet's, and the class prior."""
    devices = [images([0] * 9 + [1] * 5, seed=2), images([0] * 4 + [1] * 12, seed=3, offset=3.0)]
    tensors = SETTINGS.aggregate(
        [contribution(f"{number}", *data) for number, data in enumerate(devices)],
        FIRST,
        num_classes=C,
        seed=0,
    )
    shares = [(len(labels) - 2) / (30 - 4) for _, labels in devices]
    spectra = [np.linalg.eigh(covariance(*data)) for data in devices]
    leading = sum(
        share * (vectors[:, -2:] * squares[-2:]) @ vectors[:, -2:].T
        for share, (squares, vectors) in zip(shares, spectra, strict=True)
    )
    variance = sum(share * squares.sum() for share, (squares, _) in zip(shares, spectra, strict=True))
    whole = leading + (variance - np.trace(leading)) / L * np.eye(L)
    shrunken = whole / 2 + variance / (2 * L) * np.eye(L)
    found = np.linalg.inv(
        tensors["scale"][0] * (np.eye(L) - tensors["basis"].T.astype(float) @ tensors["basis"])
    )
    np.testing.assert_allclose(found, shrunken, rtol=0.02, atol=0.01)

    features, labels = devices[0]
    counts = np.bincount(labels, minlength=C).astype(float)
    own = np.stack([features[labels == label].mean(axis=0) for label in (0, 1)] + [np.zeros(L)])
    kappa = float(tensors["kappa"][0])
    assert 0.05 < kappa < 5  # the offset of 3 is large beside the deviations within classes
    mixed = (counts[:2, None] * own[:2] + kappa * tensors["means"][0, :2]) / (counts[:2, None] + kappa)
    precision = np.linalg.inv(found)
    expected = np.array(
        [[x @ precision @ m - m @ precision @ m / 2 for m in mixed] for x in features]
    ) / SETTINGS.tau + np.log(counts[:2] + counts.sum() / 30)
    local = {
        "local_prototypes": torch.from_numpy(own).float(),
        "local_counts": torch.from_numpy(counts).float(),
    }
    logits = FUNCTIONS.head.apply(
        {**to_torch(tensors), **local, "feature": torch.from_numpy(features).float()}
    )["logits"]
    differences = (logits[:, 0] - logits[:, 1]).numpy()
    np.testing.assert_allclose(differences, expected[:, 0] - expected[:, 1], rtol=5e-3, atol=5e-3)
    assert logits[:, 2].tolist() == [ABSENT_LOGIT] * len(features)


@pytest.mark.parametrize(("offset", "low", "high"), [(0.0, 30, 1e6), (30.0, 0, 0.02)])
def test_devices_that_differ_keep_their_own_means(offset: float, low: float, high: float) -> None:
    """The fleet's mean counts for many images where devices are alike, and for less than one where they are not."""
    labels = [0] * 40 + [1] * 40
    parts = [
        contribution(f"{number}", *images(labels, seed=number, offset=number * offset)) for number in range(4)
    ]
    kappa = SETTINGS.aggregate(parts, FIRST, num_classes=C, seed=0)["kappa"][0]
    assert low <= kappa <= high


def test_no_device_of_a_group_counts_for_more_than_its_median_device() -> None:
    """Whatever number of images it states, the group's means and how much they count stay the same."""
    labels, sets = np.tile(np.arange(C), 6), np.repeat([0, 0, 0, 0, 1, 2], C)
    offsets = np.random.default_rng(0).normal(size=(len(sets), L)).astype(np.float32)
    stated = np.full(len(sets), 10)
    few, many = (
        _of_groups(
            offsets,
            labels,
            np.where(np.arange(len(sets)) < C, count, stated),
            sets,
            shape=(1, C, L),
            variance=6,
        )
        for count in (10, 10**6)
    )
    np.testing.assert_array_equal(few[0], many[0])
    assert few[1] == many[1]


def test_no_device_counts_for_more_images_of_a_class_than_its_median_device() -> None:
    """Whatever number of images it states; a head without a device's own images is made of these means alone."""
    devices = [contribution(f"{number}", *images([0] * 9 + [1] * 9, seed=number)) for number in range(5)]
    few, many = (
        SETTINGS.aggregate(
            [*devices, replace(devices[0], device="malicious", counts=count * devices[0].counts)],
            FIRST,
            num_classes=C,
            seed=0,
        )
        for count in (1, 10**6)
    )
    np.testing.assert_array_equal(few["means"], many["means"])
    assert few["kappa"].tolist() == pytest.approx(many["kappa"].tolist(), rel=0.5)


def test_images_without_variance() -> None:
    """Identical images make a head of nearest means."""
    part = Contribution(
        device="a",
        values=np.eye(2, L, dtype=np.float32),
        labels=np.arange(2),
        counts=np.ones(2, np.int64),
        tensors={"directions": -FIRST["directions"].astype(np.float32), "deviation": np.zeros(1, np.float32)},
    )
    tensors = SETTINGS.aggregate([part], FIRST, num_classes=C, seed=0)
    assert (tensors["scale"].tolist(), tensors["basis"].tolist()) == ([1.0], [[0.0] * L])


def _scatter_of(parts: list[Contribution]) -> Floats:
    """Return the shrunken covariance that devices receive, after the limits of `[robust]`."""
    safe = robust_contributions(parts, clip_multiple=3.0, power=SETTINGS.power)
    tensors = SETTINGS.aggregate(safe, FIRST, num_classes=C, seed=0)
    basis = tensors["basis"].astype(float)
    found: Floats = np.linalg.inv(tensors["scale"][0] * (np.eye(L) - basis.T @ basis))
    return found


@pytest.mark.parametrize("deviation", [0.0, 1.0, 6e4])
def test_false_directions_count_as_much_as_the_median_devices(deviation: float) -> None:
    """However long they are, whatever deviation is stated, and whatever number of images counts."""
    devices = [contribution(f"{number}", *images([0] * 9 + [1] * 9, seed=number)) for number in range(6)]
    false = np.zeros((2, L), np.float32)
    false[:, -1] = 6e4
    attacker = replace(
        devices[0],
        device="malicious",
        counts=5 * devices[0].counts,
        tensors={"directions": false, "deviation": np.array([deviation], np.float32)},
    )
    honest, attacked = _scatter_of(devices), _scatter_of([*devices, attacker])
    assert attacked[-1, -1] - honest[-1, -1] <= honest[:-1, :-1].trace() / 6
    assert attacked[0, 0] >= honest[0, 0] / 2


def test_limits_keep_the_scatter_of_devices_with_unequal_numbers_of_images() -> None:
    """Devices that are alike make the covariance of one of them, whatever their numbers of images."""
    part = contribution("0", *images([0] * 20 + [1] * 20, seed=1))
    devices = [
        replace(part, device=str(number), counts=part.counts * times)
        for number, times in enumerate((10, 10, 10, 30, 50))
    ]
    np.testing.assert_allclose(_scatter_of(devices), _scatter_of(devices[:3]), rtol=0.01, atol=0.01)


def test_a_device_draws_its_means_to_those_of_its_group() -> None:
    """One that is like no group's devices draws them to the fleet's, and one without images uses the fleet's."""
    labels = [0] * 10 + [1] * 10
    domains = [2, 2, 2, 3, 3, 3, 4]
    data = [images(labels, seed=seed) for seed in range(7)]
    for domain, (features, _) in zip(domains, data, strict=True):
        features[:, domain] += 40
    parts = [contribution(str(number), *each) for number, each in enumerate(data)]
    tensors = SETTINGS.aggregate(parts, FIRST, num_classes=C, seed=0)
    assert len(tensors["means"]) == len(tensors["kappa"]) == 3
    np.testing.assert_allclose(tensors["means"][[1, 2], :2, [2, 3]], 40, atol=2)
    for place, part in zip([1, 1, 1, 2, 2, 2, 0], parts, strict=True):
        own, counts = torch.zeros(C, L), torch.zeros(C)
        own[:2], counts[:2] = torch.from_numpy(part.values), 10.0
        for images_counted, expected in ((counts, place), (0 * counts, 0)):
            local = {"local_prototypes": own, "local_counts": images_counted}
            assert _nearest({**to_torch(tensors), **local}).tolist() == np.eye(3)[expected].tolist()
