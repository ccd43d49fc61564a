"""Public data, its features, and how they are divided among devices."""

import io
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from benchmarks.data import features
from benchmarks.data.domains import feature_shift, label_shift, unequal
from benchmarks.data.features import backbone_file, features_of, load_features
from benchmarks.data.images import (
    MNIST_TEST_IMAGES,
    PACS,
    PAIRED,
    DataSet,
    Labeled,
    load_data,
    sample,
)
from edge_client.graphs.backbone import open_backbone
from export.to_onnx import export_module
from protocol.errors import ConfigError
from protofleet.simulation.fleet import Client, Features
from tests.benchmarks.feature_factory import fill_data, fill_weights, make_folders
from tests.support.graphs.torch_networks import described, tiny_network

BACKBONE = "tf_mobilenetv3_small_100"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROTOFLEET_BENCH_DATA", str(tmp_path))
    return tmp_path


def write_archive(file: Path, images: dict[str, int]) -> None:
    """Write images of one shade, by their names."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, shade in images.items():
            image = io.BytesIO()
            Image.new("RGB", (6, 6), (shade,) * 3).save(image, "PNG")
            archive.writestr(name, image.getvalue())


def _shares(data: DataSet) -> list[float]:
    train, test = (np.bincount(part.labels) for part in (data.train, data.test))
    return [float(share) for share in train / (train + test)]


def test_digits_of_scikit_learn() -> None:
    """Real images of 8 by 8 pixels over the whole range of gray, cut the same way every time."""
    first, second = load_data("digits"), load_data("digits")
    assert first.train.images.shape[1:] == (8, 8)
    assert (first.train.images.min(), first.train.images.max()) == (0, 240)
    assert len(first.train.labels) + len(first.test.labels) == 1797
    assert np.array_equal(first.train.images, second.train.images)
    assert _shares(first) == pytest.approx([0.55] * 10, abs=0.01)


def test_no_digit_for_training_has_a_twin_for_evaluation(folder: Path) -> None:
    """MNIST-M's image i is made of MNIST's test image i: no such pair is on both sides, whatever is sampled."""
    numbers = np.arange(MNIST_TEST_IMAGES)
    test = np.zeros((MNIST_TEST_IMAGES, 1, 2), np.uint8)
    test[:, 0, 0], test[:, 0, 1] = numbers // 256, numbers % 256
    labels = (numbers % 10).astype(np.uint8)
    np.savez(folder / "mnist.npz", x_train=test[:1], y_train=labels[:1], x_test=test, y_test=labels)
    np.savez(folder / "mnist_m.npz", x=test[:9001], y=labels[:9001])
    colored, gray = load_data("mnist_m"), sample(load_data("mnist").test, PAIRED)

    def digits(part: Labeled) -> set[tuple[int, int]]:
        return {(int(image[0, 0]), int(image[0, 1])) for image in part.images}

    assert not digits(colored.train) & (digits(gray) | digits(colored.test))
    assert (len(colored.train.labels), len(colored.test.labels)) == (6768, 2233)
    for part in (colored.train, colored.test):
        high, low = part.images[:, 0].astype(np.int64).T
        assert np.array_equal(part.labels, (256 * high + low) % 10)


def test_domains_of_an_archive(folder: Path) -> None:
    """Half of each class is for training; both image formats are read; a domain alone, or all of them pooled."""
    names = [
        f"{kind}/{number}.{'jpg' if number % 2 else 'png'}" for kind in ("dog", "cat") for number in range(4)
    ]
    write_archive(
        folder / "pacs.zip",
        {f"{domain.removeprefix('pacs_')}/{name}": 50 for domain in PACS for name in names},
    )
    data = load_data("pacs_sketch")
    assert data.train.images.shape == data.test.images.shape == (4, 6, 6, 3)
    assert _shares(data) == [0.5, 0.5]
    assert load_data("pacs").train.labels.tolist() == [0, 0, 1, 1] * 4


def test_folders_in_an_archive(folder: Path) -> None:
    """CIFAR-10's classes are numbered in the order of their names, whatever the order in the archive."""
    images = {"truck/200": 200, "cat/0": 0, "cat/100": 100}
    write_archive(
        folder / "cifar10.zip",
        {f"{part}/{name}.png": shade for part in ("test", "train") for name, shade in images.items()},
    )
    data = load_data("cifar10")
    assert data.train.labels.tolist() == [0, 0, 1]
    assert data.test.images[:, 0, 0, 0].tolist() == [0, 100, 200]


def test_missing_data_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"mnist\.npz.*PROTOFLEET_BENCH_DATA"):
        load_data("mnist")


def test_sample_is_reproducible() -> None:
    """The same images every time, each with its class; all of them where there are no more."""
    train = load_data("digits").train
    some = sample(train, 20)
    assert np.array_equal(some.images, sample(train, 20).images)
    for image, label in zip(some.images, some.labels, strict=True):
        found = (train.images == image).all(axis=(1, 2))
        assert label in train.labels[found]
    assert len(sample(train, 10**6).labels) == len(train.labels)


def test_blocks_are_extracted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any selection has the values of the file with these blocks alone; the second one decodes no image."""
    make_folders(tmp_path, monkeypatch)
    fill_data(tmp_path, train=20, test=10)
    fill_weights(tmp_path, monkeypatch, BACKBONE)
    load_features("mnist", backbone=f"{BACKBONE}:all", image_size=32)
    (tmp_path / "data" / "mnist.npz").rename(tmp_path / "mnist.npz")
    selected = load_features("mnist", backbone=f"{BACKBONE}:last,layer2", image_size=32)
    graph = open_backbone(backbone_file(f"{BACKBONE}:last,layer2", image_size=32))
    images = np.load(tmp_path / "mnist.npz")["x_test"]
    assert selected.normalized
    np.testing.assert_allclose(selected.test, features_of(images, graph, ""), atol=1e-5)


def test_backbone_is_quantized_once_for_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = tmp_path / "backbone.onnx"
    export_module(tiny_network(), described(), path=graph)
    digits = load_data("digits").train
    part = Labeled(np.repeat(digits.images[:12, :, :, None], 3, axis=3), digits.labels[:12])
    monkeypatch.setattr(features, "load_data", {"some": DataSet(part, part)}.pop)
    file = features.quantized_file(graph, data="some")
    assert features.quantized_file(graph, data="some") == file
    assert any(node.op_type == "QuantizeLinear" for node in onnx.load(file).graph.node)
    assert open_backbone(file, provider="cpu", threads=1).metadata.precision == "int8"


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
