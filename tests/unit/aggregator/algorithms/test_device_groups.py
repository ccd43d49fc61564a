"""Groups of devices from their class means alone."""

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregator.algorithms.clustering import NO_GROUP, group_devices

L, C = 30, 4


def groups_of(domains: list[int], *, apart: float, seed: int) -> NDArray[np.int64]:
    """Group devices with ten images of each class, whose domains' class means differ by so many deviations."""
    random = np.random.default_rng(seed)
    of_domains = apart * random.normal(size=(max(domains) + 1, C, L))
    devices, labels = np.repeat(np.arange(len(domains)), C), np.tile(np.arange(C), len(domains))
    means = of_domains[np.array(domains)[devices], labels] + random.normal(size=(len(devices), L)) / 10**0.5
    fleet = np.stack([means[labels == label].mean(axis=0) for label in range(C)])
    return group_devices(means - fleet[labels], labels, np.full(len(devices), 10), devices)


@pytest.mark.parametrize("seed", range(5))
def test_devices_of_one_domain_are_a_group(seed: int) -> None:
    """A device alone in its domain is in none."""
    domains = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 3]
    groups = groups_of(domains, apart=1.0, seed=seed)
    assert groups.tolist() == [NO_GROUP if domain == 3 else domain for domain in domains]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("domains", "apart"),
    [
        ([0] * 12, 1.0),
        (list(range(12)), 0.0),
        (list(range(12)), 1.0),
        ([0, 0, 1, 1, 2, 2], 1.0),
        ([0, 0, 0], 1.0),
    ],
    ids=["one domain", "alike", "a domain each", "two devices each", "few"],
)
def test_other_devices_are_in_no_group(domains: list[int], apart: float, seed: int) -> None:
    """Means that do not predict the others', and groups in which one device would know or decide another's mean."""
    assert set(groups_of(domains, apart=apart, seed=seed).tolist()) == {NO_GROUP}


def test_classes_of_one_device_are_no_reason_for_groups() -> None:
    """Nothing is known of them but by the device itself; nor is there anything to group without devices."""
    devices = np.arange(6)
    offsets = np.random.default_rng(0).normal(size=(6, L))
    assert group_devices(offsets, devices, np.full(6, 10), devices).tolist() == [NO_GROUP] * 6
    none = np.zeros(0, np.int64)
    assert group_devices(np.zeros((0, L)), none, none, none).tolist() == []
