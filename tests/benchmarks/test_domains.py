import numpy as np
import pytest

from benchmarks.data.domains import feature_shift, label_shift, unequal
from protocol.errors import ConfigError
from protofleet.simulation.fleet import Client, Features


def _features(offset: int, *, per_class: int = 30) -> Features:
    """A domain of three classes whose only feature is the image's number."""
    numbers = np.arange(offset, offset + 6 * per_class, dtype=np.float32)[:, None]
    labels = np.arange(6 * per_class) % 3
    half = 3 * per_class
    return Features(numbers[:half], labels[:half], numbers[half:], labels[half:])


DOMAINS = {"first": _features(0), "second": _features(1000)}


def _numbers(clients: list[Client]) -> list[float]:
    return [float(number) for client in clients for number in client.train[:, 0]]


def test_feature_shift() -> None:
    """One client a domain, with as many images of every class, evaluated on its own domain's test images."""
    clients = feature_shift(DOMAINS, per_class=4, rng=np.random.default_rng(0), validation=False)
    assert [client.domain for client in clients] == ["first", "second"]
    for client, domain in zip(clients, DOMAINS.values(), strict=True):
        assert np.bincount(client.train_labels).tolist() == [4, 4, 4]
        assert np.isin(client.train, domain.train).all()
        assert client.test is domain.test
        assert client.accuracy(client.test_labels) == pytest.approx(1)


def test_label_shift() -> None:
    """Each image of a class goes to one client, and a client is evaluated on its own mixture of classes."""
    clients = label_shift(
        DOMAINS,
        ("first", "first", "second"),
        per_class=8,
        concentration=0.5,
        rng=np.random.default_rng(0),
        validation=False,
    )
    counts = np.array([np.bincount(client.train_labels, minlength=3) for client in clients])
    assert counts.sum(axis=0).tolist() == [24, 24, 24]
    assert len(set(_numbers(clients))) == 72
    for client, mine in zip(clients, counts, strict=True):
        always_first = np.zeros_like(client.test_labels)
        assert client.accuracy(always_first) == pytest.approx(mine[0] / mine.sum())


def test_validation_images_belong_to_no_client() -> None:
    """Settings are chosen on training images that no client trains on."""
    for validation in (
        feature_shift(DOMAINS, per_class=4, rng=np.random.default_rng(0), validation=True),
        unequal(DOMAINS, {"first": (2, 10), "second": (1, 5)}, rng=np.random.default_rng(0), validation=True),
    ):
        learned = set(_numbers(validation))
        for client in validation:
            judged = {float(number) for number in client.test[:, 0]}
            assert judged
            assert not judged & learned
            assert not judged & {float(number) for number in DOMAINS[client.domain].test[:, 0]}


def test_unequal_domains() -> None:
    """As many clients and images as the plan has, no image twice; more than there are is an error."""
    plan = {"first": (3, 10), "second": (1, 20)}
    clients = unequal(DOMAINS, plan, rng=np.random.default_rng(0), validation=False)
    assert [(client.domain, len(client.train)) for client in clients] == [
        *[("first", 10)] * 3,
        ("second", 20),
    ]
    assert len(set(_numbers(clients))) == 50
    with pytest.raises(ConfigError, match="first has 90 images, not 4 times 30"):
        unequal(DOMAINS, {"first": (4, 30)}, rng=np.random.default_rng(0), validation=False)


def test_too_few_images_of_a_class() -> None:
    with pytest.raises(ConfigError, match="first has too few images of class 0"):
        feature_shift(DOMAINS, per_class=31, rng=np.random.default_rng(0), validation=False)


def test_seed_decides() -> None:
    first, second, other = (
        _numbers(feature_shift(DOMAINS, per_class=4, rng=np.random.default_rng(seed), validation=False))
        for seed in (0, 0, 1)
    )
    assert first == second
    assert first != other
