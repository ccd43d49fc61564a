"""Partitions of images over devices, and simulated fleets on arrays and on folders of images."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import click
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import protofleet
from aggregator.algorithms.algorithm import OneShot, Training
from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.fedtc.train_head import FedTC, TrainedHead
from aggregator.algorithms.fedtc.training_set import TrainingSet
from aggregator.algorithms.hierarchical import Hierarchical
from aggregator.algorithms.statistics.feature_map import Statistics
from aggregator.config.schema import Robust
from protocol.errors import ConfigError
from protofleet.cli import cli, describe
from protofleet.simulation import algorithms, rounds, simulate, statistics
from protofleet.simulation.fleet import Client, pooled
from protofleet.simulation.partitions import Partition, parse_partition, share_out
from tests.support.fleets.fleet import write_digits
from tests.support.graphs.exported_graphs import exported
from tests.unit.protofleet.conftest import CLASSES

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


CHEAP = ("statistics", "alone")


@pytest.fixture(scope="module")
def digits() -> protofleet.Dataset:
    """400 handwritten digits in two domains, their pixels as features; the second domain is darker."""
    pixels, labels = load_digits(return_X_y=True)
    domain = np.arange(400) % 2
    return protofleet.Dataset(
        features=(pixels[:400] / 16 / (1 + domain[:, None])).astype(np.float32),
        labels=labels[:400].astype(np.int64),
        classes=tuple(map(str, range(10))),
        domains=("bright", "dark"),
        domain_of=domain,
    )


def test_fleet_is_better_than_each_device_alone(digits: protofleet.Dataset) -> None:
    """On all held-out images; a device alone knows its own classes only."""
    made = protofleet.simulate(digits, devices=8, partition="sharding:3", algorithms=("fedtc", *CHEAP))
    assert [each.algorithm for each in made.results] == ["fedtc", *CHEAP]
    assert made["statistics"].accuracy > made["alone"].accuracy + 0.3
    assert made["fedtc"].accuracy > made["alone"].accuracy + 0.3
    assert made["alone"].device_mean > made["alone"].accuracy
    assert made["fedtc"].device_mean > made["fedtc"].accuracy + 0.02, "with the prior of the device's classes"
    for result in made.results:
        assert result.device_worst <= result.device_mean <= 1
        assert (result.uploads > 0) == (result.up_bytes > 0) == (result.algorithm != "alone")


def test_every_image_is_on_one_device_or_held_out(digits: protofleet.Dataset) -> None:
    """Devices are shared out evenly over domains, and a fifth of each class of each domain is held out."""
    made = protofleet.simulate(digits, devices=5, partition="dirichlet:0.5", algorithms=("alone",))
    assert made.images.sum() + made.held_out == len(digits.labels)
    assert made.domains == ("bright",) * 3 + ("dark",) * 2
    assert 0.15 * 400 < made.held_out <= 0.2 * 400


def test_seed_decides_the_division(digits: protofleet.Dataset) -> None:
    first, again, other = (
        protofleet.simulate(digits, devices=4, algorithms=("statistics",), seed=seed) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first.images, again.images)
    assert first["statistics"].device_accuracies == again["statistics"].device_accuracies
    assert not np.array_equal(first.images, other.images)


def test_devices_without_images_take_no_part(digits: protofleet.Dataset) -> None:
    """Their accuracy is not a number, which is null in JSON and does not count in means."""
    made = protofleet.simulate(digits, devices=60, partition="dirichlet:0.01", algorithms=("statistics",))
    empty = np.flatnonzero(made.images.sum(axis=1) == 0)
    result = made["statistics"]
    assert len(empty)
    assert all(math.isnan(result.device_accuracies[number]) for number in empty)
    assert 0.5 < result.device_mean <= 1
    stored = json.loads(json.dumps(made.as_dict(), allow_nan=False))
    assert stored["results"][0]["device_accuracies"][empty[0]] is None


def test_device_accuracy_is_over_its_own_mixture_of_classes(digits: protofleet.Dataset) -> None:
    """A head that knows one class only is right on the devices that have no other."""
    clients = simulate.deal_out(digits, Partition("sharding", 1), devices=20, held_out=0.2, seed=0)
    for client in clients:
        (label,) = np.unique(client.train_labels)
        assert client.accuracy(np.full(len(client.test_labels), label)) == pytest.approx(1)
        assert client.accuracy(np.full(len(client.test_labels), (label + 1) % 10)) == 0


def test_outlier_is_reported_by_its_number() -> None:
    """Outlier detection is on, as in the aggregator: the only device of a domain far from the others is found."""
    random = np.random.default_rng(0)
    labels, domain = np.tile(np.arange(3), 300), np.repeat(np.arange(9), 100)
    centers = random.normal(size=(3, 8))
    features = centers[labels] + random.normal(scale=0.1, size=(900, 8)) + 50.0 * (domain == 8)[:, None]
    data = protofleet.Dataset(
        features=features.astype(np.float32),
        labels=labels,
        classes=("a", "b", "c"),
        domains=tuple(map(str, range(9))),
        domain_of=domain,
    )
    made, unprotected = (
        protofleet.simulate(data, devices=9, partition="iid", algorithms=("statistics",), robust=robust)
        for robust in (None, Robust(detect_outliers=False))
    )
    assert made["statistics"].quarantined == ("8",)
    assert unprotected["statistics"].quarantined == ()


class Majority(OneShot, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An algorithm that is not registered: the class with the most images, with a bonus for the first class."""

    name: ClassVar[str] = "majority"
    bonus: float = 0.0

    def train(self, data: TrainingSet, training: Training, **_: Any) -> TrainedHead:
        """Return a head of constants."""
        assert data.scatter is None
        del training
        images = np.bincount(data.labels, data.counts, minlength=data.num_classes).astype(np.float32)
        images[0] += np.float32(self.bonus)
        layer = Dense(np.zeros((data.num_classes, data.values.shape[1]), np.float32), images / images.sum())
        return TrainedHead(layers=(layer,), loss=0.0, accuracy=0.0, epochs=0, temperature=1.0)


def test_one_shot_algorithm_that_is_not_registered_is_simulated(digits: protofleet.Dataset) -> None:
    """An instance, with its settings; it is in the results by its name.

    It does not say that it uses principal prototypes, so that it has the prototypes of batches.
    """
    arguments: Any = {"devices": 4, "partition": "iid"}
    made = protofleet.simulate(digits, algorithms=(Majority(), "fedncm"), **arguments)
    assert 0 < made["majority"].accuracy < 0.2 < made["fedncm"].accuracy
    assert 0 < made["majority"].up_bytes != made["fedncm"].up_bytes > 0
    other = protofleet.simulate(digits, algorithms=(Majority(bonus=1e6),), **arguments)
    assert other["majority"].device_accuracies != made["majority"].device_accuracies


def test_settings_of_statistics_are_simulated(digits: protofleet.Dataset) -> None:
    few, many = (
        protofleet.simulate(digits, devices=4, algorithms=(Statistics(features=features),))["statistics"]
        for features in (0, 64)
    )
    assert few.up_bytes < many.up_bytes


def test_an_algorithm_that_cannot_take_so_many_features_is_skipped(digits: protofleet.Dataset) -> None:
    """The others run, and the report says what to choose."""
    long = Statistics(features=4096)
    made = protofleet.simulate(digits, devices=4, algorithms=("alone", long))
    assert [each.algorithm for each in made.results] == ["alone"]
    reason = "64 features of the backbones and 4096 random ones are more than 4096: lower statistics.features"
    assert made.skipped["statistics"].startswith(reason)
    assert f"statistics: skipped: {made.skipped['statistics']}" in describe(made)
    with pytest.raises(ConfigError, match=f"statistics: {reason}"):
        protofleet.simulate(digits, devices=4, algorithms=(long,))


class Sums(Majority, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sums: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 1}, "expected 2 to 400 devices"),
        ({"devices": 401}, "expected 2 to 400 devices"),
        ({"partition": "equal"}, "expected a partition such as"),
        ({"algorithms": ("fedavg",)}, "no algorithm .fedavg.: expected one of fedtc"),
        ({"algorithms": (Sums(),)}, "majority: expected an algorithm of rounds"),
        (
            {"algorithms": ("statistics", Statistics(features=8))},
            "several algorithms have one name: statistics, statistics",
        ),
        ({"held_out": 1.0}, "between 0 and 1"),
        ({"held_out": 0.01}, "no image is held out"),
    ],
)
def test_wrong_argument_is_refused(
    digits: protofleet.Dataset, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        protofleet.simulate(digits, **{"algorithms": ("alone",), **changes})  # type: ignore[arg-type]


def test_arrays_that_do_not_fit_are_refused() -> None:
    features, labels = np.zeros((4, 2), np.float32), np.array([0, 1, 1, 3])
    with pytest.raises(ConfigError, match="check class 2"):
        protofleet.Dataset(features=features, labels=labels, classes=("a", "b", "c"))
    with pytest.raises(ConfigError, match=r"features \(n, L\)"):
        protofleet.Dataset(features=features[:3], labels=labels, classes=("a", "b", "c"))


def test_folder_is_read_as_devices_read_it(photos: Path, backbone: Path, tmp_path: Path) -> None:
    """Features are the same from the cache; an unreadable image is left out and named, an empty class too."""
    folder = tmp_path / "photos"
    shutil.copytree(photos, folder)
    (folder / "empty").mkdir()
    (folder / "0" / "broken.png").write_bytes(b"no image")
    steps: list[tuple[int, int]] = []
    first, again = (
        protofleet.load_dataset(
            folder, backbone, cache=tmp_path / "cache", on_progress=lambda *step: steps.append(step)
        )
        for _ in range(2)
    )
    assert first.classes == CLASSES
    assert first.features.shape == (160, 16)
    assert first.backbone_bytes == backbone.stat().st_size
    assert [path.name for path, _ in first.unusable] == ["broken.png"]
    np.testing.assert_array_equal(first.features, again.features)
    assert steps[-1] == (161, 161)
    paths = [image for name in CLASSES for image in sorted((photos / name).iterdir())]
    np.testing.assert_array_equal(first.features, protofleet.extract_features(paths, backbone))


def test_list_of_images_is_read(photos: Path, backbone: Path, tmp_path: Path) -> None:
    rows = [f"{path},{path.parent.name}" for path in sorted(photos.rglob("*.png"))]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows]))
    data = protofleet.load_dataset(tmp_path / "list.csv", backbone)
    assert data.classes == CLASSES
    assert len(data.labels) == 160


def test_domains_are_top_level_folders(backbone: Path, tmp_path: Path) -> None:
    """A class may be missing in a domain; files of the same name in two domains are two images."""
    write_digits(tmp_path / "barn", classes=[0, 1], each=10)
    write_digits(tmp_path / "shed", classes=[1, 3], each=5)
    data = protofleet.load_dataset(tmp_path, backbone, domains=True)
    assert (data.classes, data.domains) == (("0", "1", "3"), ("barn", "shed"))
    assert data.domain_of is not None
    assert np.bincount(data.domain_of).tolist() == [20, 10]
    assert np.bincount(data.labels).tolist() == [10, 15, 5]


def test_sample_has_so_many_images_of_each_class(photos: Path, backbone: Path) -> None:
    """The same ones every time."""
    first, again = (protofleet.load_dataset(photos, backbone, per_class=5) for _ in range(2))
    assert np.bincount(first.labels).tolist() == [5, 5, 5, 5]
    np.testing.assert_array_equal(first.features, again.features)


def test_folder_without_images_is_refused(backbone: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no usable images"):
        protofleet.load_dataset(tmp_path, backbone)


def test_command_shows_a_table_or_json(photos: Path, backbone: Path, tmp_path: Path) -> None:
    arguments = [
        "simulate", str(photos), "--backbone", str(backbone), "--devices", "4", "--cache", str(tmp_path),
        "--algorithm", "statistics", "--algorithm", "alone",
    ]  # fmt: skip
    shown = CliRunner().invoke(cli, arguments)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("4 devices, dirichlet:0.3, seed 0: ")
    table = [line.split()[0] for line in lines if " % " in line]
    counting = next(line for line in lines if line.endswith("images count"))
    assert table == ["algorithm", "statistics", "alone"]
    assert counting.startswith("statistics: ")
    made = CliRunner().invoke(cli, [*arguments, "--json"])
    first, second = json.loads(made.stdout)["results"]
    assert (first["algorithm"], second["algorithm"]) == ("statistics", "alone")
    assert f"{first['counting']['counted']} of {first['counting']['images']} images count" in counting
    assert second["counting"] is None


def test_missing_file_is_one_line(photos: Path, backbone: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError, match=r"cannot read .*missing: No such file"):
        protofleet.load_dataset(missing, backbone)
    with pytest.raises(protofleet.ProtofleetError, match=r"cannot load missing: .*No such file"):
        protofleet.load_dataset(photos, missing)


def test_options_of_the_command_are_those_of_the_function() -> None:
    (option,) = [each for each in cli.commands["simulate"].params if each.name == "algorithms"]
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == simulate.ALGORITHMS
    assert option.default == simulate.DEFAULT_ALGORITHMS


SIZE = 12

NUMBERS = st.one_of(st.just(0), st.integers(1, 6), st.integers(1, 100))
"""Images of a class on a device."""

NUMBERS_OF_CLASSES = st.integers(2, 10)


@st.composite
def fleets(draw: st.DrawFn, numbers: st.SearchStrategy[int] = NUMBERS_OF_CLASSES) -> list[Client]:
    """Return devices with random features, of one of these numbers of classes; the last has one or two images."""
    devices, classes = draw(st.integers(1, 10)), draw(numbers)
    images = np.array(draw(st.lists(NUMBERS, min_size=devices * classes, max_size=devices * classes)))
    images = images.reshape(devices, classes)
    if devices > 1:
        images[-1] = 0
        images[-1, draw(st.integers(0, classes - 1))] = draw(st.integers(1, 2))
    assume(np.count_nonzero((images >= 2).any(axis=0)) >= 2)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    centers = random.normal(0, draw(st.sampled_from([0.1, 1.0, 10.0])), (classes, SIZE))

    def features(labels: NDArray[np.int64]) -> NDArray[np.float32]:
        return (centers[labels] + random.normal(size=(len(labels), SIZE))).astype(np.float32)

    truth = np.arange(classes)
    labels = [np.repeat(truth, row) for row in images]
    return [
        Client(
            domain="", train=features(own), train_labels=own,
            test=features(truth), test_labels=truth, weights=np.ones(classes),
        )
        for own in labels
        if len(own)
    ]  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, 5])
@given(clients=fleets())
def test_statistics_gives_a_finite_head(clients: list[Client], batch_size: int) -> None:
    """By the aggregator's job and its result file."""
    features, owners = pooled(clients)
    data = statistics.map_features(features, random_features=8, seed=0)
    made = statistics.run_fleet(data, owners, batch_size=batch_size, seed=0, robust=Robust())
    assert np.isfinite(made.logits).all()
    assert 0 < made.counting.counted <= made.counting.images
    assert bool(made.counting.limited) == (made.counting.counted < made.counting.images)


@settings(max_examples=50)
@given(clients=fleets())
def test_fedtc_gives_a_finite_head(clients: list[Client]) -> None:
    """After a few steps, in place of hundreds of epochs."""
    brief = Training(epochs=3, device="cpu")
    made = algorithms.train_prototypes(FedTC(), clients, robust=Robust(), training=brief)
    assert np.isfinite(made.logits[0]).all()


@settings(max_examples=20)
@given(clients=fleets(st.just(4)))
def test_hierarchical_gives_a_finite_head(clients: list[Client]) -> None:
    """Its graphs are exported once, for one number of classes."""
    with patch.object(rounds, "_built", exported):
        made = algorithms.train_rounds(Hierarchical(), clients, classes=4)
    assert all(np.isfinite(logits).all() for logits in made.logits)
