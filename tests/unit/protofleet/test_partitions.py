import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from protofleet.simulation.partitions import Partition, parse_partition, share_out

partitions = st.one_of(
    st.builds(Partition, st.just("sharding"), st.integers(1, 7)),
    st.builds(Partition, st.just("dirichlet"), st.sampled_from([0.001, 0.01, 0.1, 0.5, 100.0])),
)


@given(partition=partitions, seed=st.integers(0, 100), labels=st.lists(st.integers(0, 6), max_size=200))
def test_every_image_goes_to_one_client(partition: Partition, seed: int, labels: list[int]) -> None:
    all_labels = np.array([*labels, *range(7)], dtype=np.int64)
    owners = share_out(all_labels, partition, clients=7, rng=np.random.default_rng(seed))
    assert owners.shape == all_labels.shape
    assert ((owners >= 0) & (owners < 7)).all()


@pytest.mark.parametrize("delta", [1, 2, 3, 10])
@pytest.mark.parametrize("clients", [10, 20])
def test_sharding_gives_each_client_delta_classes(delta: int, clients: int) -> None:
    """Each client has exactly delta classes, and the clients of a class have equally many of its images."""
    labels = np.repeat(np.arange(10), 600)
    owners = share_out(labels, Partition("sharding", delta), clients=clients, rng=np.random.default_rng(0))
    table = np.histogram2d(owners, labels, bins=(np.arange(clients + 1), np.arange(11)))[0]
    assert ((table > 0).sum(axis=1) == delta).all()
    assert set(table[table > 0]) == {600 * 10 / (clients * delta)}


def test_small_concentration_separates_classes() -> None:
    """The largest client of a class has nearly all of it at beta 0.01, and a fair share at beta 100."""
    labels = np.repeat(np.arange(10), 600)
    largest = {}
    for beta in (0.01, 100.0):
        owners = share_out(labels, Partition("dirichlet", beta), clients=10, rng=np.random.default_rng(0))
        table = np.histogram2d(owners, labels, bins=(np.arange(11), np.arange(11)))[0]
        largest[beta] = table.max(axis=0).mean() / 600
    assert largest[0.01] > 0.9
    assert largest[100.0] < 0.2


def test_seed_decides() -> None:
    labels = np.repeat(np.arange(10), 60)
    first, again, other = (
        share_out(labels, Partition("dirichlet", 0.5), clients=10, rng=np.random.default_rng(seed))
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("text", ["iid", "sharding:2", "dirichlet:0.1", "dirichlet:3"])
def test_partition_text_round_trip(text: str) -> None:
    """The command line and the report spell partitions alike."""
    assert str(parse_partition(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "sharding", "sharding:0", "sharding:1.5", "dirichlet:0", "dirichlet:nan", "dirichlet:inf", "iid:1"],
)
def test_invalid_partition_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"sharding:2 or dirichlet:0\.1"):
        parse_partition(text)


@pytest.mark.parametrize(("clients", "delta"), [(3, 3), (10, 11)])
def test_impossible_sharding_is_refused(clients: int, delta: int) -> None:
    """Too few clients would leave images over; no client has more classes than there are."""
    with pytest.raises(ConfigError, match="expected sharding:N with N from"):
        share_out(np.arange(10), Partition("sharding", delta), clients=clients, rng=np.random.default_rng(0))


def test_random_partition_gives_all_clients_equally_many() -> None:
    owners = share_out(np.repeat([0, 1], 10), Partition("iid"), clients=4, rng=np.random.default_rng(0))
    assert np.bincount(owners).tolist() == [5, 5, 5, 5]
