import io
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from benchmarks.data import features
from benchmarks.data.features import backbone_file, features_of, load_features
from benchmarks.data.images import (
    MNIST_TEST_IMAGES,
    PAIRED,
    DataSet,
    Labeled,
    load_data,
    sample,
)
from edge_client.runtime.backbone import open_backbone
from export.to_onnx import export_module
from tests.benchmarks.feature_factory import fill_data, fill_weights, make_folders
from tests.support.graphs.torch_networks import described, tiny_network

BACKBONE = "tf_mobilenetv3_small_100"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROTOFLEET_BENCH_DATA", str(tmp_path))
    return tmp_path


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


def test_domain_of_an_archive(folder: Path) -> None:
    """Both image formats are read, other domains are not."""
    with zipfile.ZipFile(folder / "pacs.zip", "w") as archive:
        for name in ("sketch", "photo"):
            for number in range(8):
                image = io.BytesIO()
                Image.new("RGB", (6, 6), (number,) * 3).save(image, "PNG")
                kind = "png" if number % 2 else "jpg"
                archive.writestr(f"{name}/{'dog' if number < 4 else 'cat'}/{number}.{kind}", image.getvalue())
    data = load_data("pacs_sketch")
    assert data.train.images.shape == data.test.images.shape == (4, 6, 6, 3)
    assert _shares(data) == [0.5, 0.5]


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
