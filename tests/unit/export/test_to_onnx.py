"""A torch network becomes one ONNX file, or there is no file; the comparison with torch finds the worst photo."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from export.parity import BATCH, COMPARED, Reference, compare, compared_photos, sample_photos
from export.to_onnx import OPSET, export_module, to_onnx
from protocol.errors import ConfigError, ProtofleetError, StateError
from protocol.models.onnx_metadata import BackboneMetadata, Block, read_metadata
from tests.support.graphs.torch_networks import EDGE, FEATURE_SIZE, described, tiny_network


def random_images(count: int) -> NDArray[np.uint8]:
    """(count, H, W, 3) uint8."""
    return np.random.default_rng(count).integers(0, 256, (count, EDGE, EDGE, 3), dtype=np.uint8)


def test_graph_normalizes_any_number_of_images(tiny_file: bytes) -> None:
    network, metadata = tiny_network(), described()
    session = onnxruntime.InferenceSession(tiny_file)
    for count in (1, 2, 9):
        images = random_images(count)
        normalized = (images / 255.0 - np.array(metadata.mean)) / np.array(metadata.std)
        with torch.inference_mode():
            expected = network(torch.from_numpy(normalized.transpose(0, 3, 1, 2)).float()).numpy()
        (features,) = session.run(["feature"], {"image": images})
        assert features.dtype == np.float32
        assert features.shape == (count, FEATURE_SIZE)
        np.testing.assert_allclose(features, expected, atol=1e-5)


def test_file_has_inputs_outputs_opset_and_metadata(tmp_path: Path) -> None:
    path = tmp_path / "tiny.onnx"
    exported = export_module(tiny_network(), described(), path=path)

    file = path.read_bytes()
    session = onnxruntime.InferenceSession(file)
    (image,), (feature,) = session.get_inputs(), session.get_outputs()
    assert (image.name, image.type, image.shape) == ("image", "tensor(uint8)", ["n", EDGE, EDGE, 3])
    assert (feature.name, feature.type, feature.shape) == ("feature", "tensor(float)", ["n", FEATURE_SIZE])
    metadata = read_metadata(session.get_modelmeta().custom_metadata_map, BackboneMetadata)
    assert metadata == exported.metadata
    assert metadata.parity is not None
    assert metadata.parity.images == 2
    assert metadata.parity.relative_error < 1e-5
    assert exported.sha256 == hashlib.sha256(file).hexdigest()
    assert exported.size_bytes == len(file)
    assert [path] == list(tmp_path.iterdir())


def test_export_is_deterministic(tiny_file: bytes) -> None:
    assert to_onnx(tiny_network(), described()) == tiny_file


def test_file_contains_no_local_paths(tiny_file: bytes) -> None:
    assert b".py" not in tiny_file
    assert str(Path.cwd()).encode() not in tiny_file


def test_file_has_the_operator_set_of_the_oldest_runtime(tiny_file: bytes) -> None:
    model = onnx.load_from_string(tiny_file)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]


@pytest.fixture
def exported_before(tiny_file: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `export_module` take the file of the tiny network."""
    monkeypatch.setattr("export.to_onnx.to_onnx", lambda *_, **__: tiny_file)


@pytest.mark.usefixtures("exported_before")
@pytest.mark.parametrize("fault", [1.01, float("nan")])
def test_differing_graph_is_not_written(tmp_path: Path, fault: float) -> None:
    path = tmp_path / "tiny.onnx"
    path.write_bytes(b"older")
    network = tiny_network()

    def reference(_image: Image.Image) -> NDArray[np.float32]:
        return np.full(FEATURE_SIZE, fault, dtype=np.float32)

    with pytest.raises(ProtofleetError, match=r"relative error .* no file was written"):
        export_module(network, described(), path=path, reference=reference)
    assert path.read_bytes() == b"older"
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.usefixtures("exported_before")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": (Block(name="", width=FEATURE_SIZE),)}, "metadata .*name"),
        ({"feature_size": FEATURE_SIZE + 1}, r"must take .* give feature float32 \(any, 13\)"),
    ],
)
def test_a_file_that_devices_would_refuse_is_not_written(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    metadata = msgspec.structs.replace(described(), **change)
    with pytest.raises(
        ProtofleetError, match=f"devices would refuse the file, and none was written: .*{message}"
    ):
        export_module(tiny_network(), metadata, path=tmp_path / "tiny.onnx")
    assert not list(tmp_path.iterdir())


class Traceable(nn.Module):
    """A network that only PyTorch's older exporter takes."""

    def __init__(self) -> None:
        super().__init__()
        self.network = tiny_network()

    def forward(self, image: Tensor) -> Tensor:
        """Return the network's feature."""
        if torch.compiler.is_compiling():
            raise RuntimeError("not supported")
        feature: Tensor = self.network(image)
        return feature


def test_the_older_exporter_of_pytorch_is_the_second_choice(tmp_path: Path) -> None:
    exported = export_module(Traceable().eval(), described(), path=tmp_path / "tiny.onnx")
    assert exported.metadata.parity is not None
    assert exported.metadata.parity.relative_error < 1e-5
    session = onnxruntime.InferenceSession(exported.path)
    assert session.get_outputs()[0].shape == ["n", FEATURE_SIZE]


@pytest.mark.usefixtures("exported_before")
def test_missing_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="Not a directory"):
        export_module(tiny_network(), described(), path=tmp_path / "file" / "tiny.onnx")


class Undecided(nn.Module):
    """A network whose way depends on the pixels, which no graph can hold."""

    def forward(self, image: Tensor) -> Tensor:
        """Return the mean or the maximum."""
        return image.mean(dim=(2, 3)) if image.sum() > 0 else image.amax(dim=(2, 3))


def test_unexportable_network_is_named() -> None:
    with pytest.raises(ProtofleetError, match="torch cannot export tiny") as caught:
        to_onnx(Undecided(), described(feature_size=3))
    assert "\n" not in str(caught.value)


def first_value_of(photo: Image.Image) -> int:
    """Return the value that distinguishes the test's images."""
    return int(np.asarray(photo)[0, 0, 0])


def reference_of(file: bytes, *, wrong_at: int, factor: float) -> Reference:
    """Return the features that the file itself computes, changed for one photo."""
    import onnxruntime

    from protocol.models.preprocessing import preprocess

    session = onnxruntime.InferenceSession(file)

    def reference(photo: Image.Image) -> NDArray[np.float32]:
        image = preprocess(photo, described().preprocessing)[None]
        feature: NDArray[np.float32] = session.run(["feature"], {"image": image})[0][0]
        return feature * np.float32(factor) if first_value_of(photo) == wrong_at else feature

    return reference


def images(count: int) -> Iterator[Image.Image]:
    """Gray images, each of another shade."""
    return (Image.new("RGB", (20, 20), (shade, shade, shade)) for shade in range(count))


@pytest.mark.parametrize(
    ("wrong_at", "factor", "error", "cosine"),
    [(0, 2, 0.5, 1), (3, 2, 0.5, 1), (BATCH + 2, 2, 0.5, 1), (1, -1, 2, -1)],
)
def test_worst_image_decides_parity(
    tiny_file: bytes, wrong_at: int, factor: float, error: float, cosine: float
) -> None:
    parity = compare(
        tiny_file,
        preprocessing=described().preprocessing,
        reference=reference_of(tiny_file, wrong_at=wrong_at, factor=factor),
        photos=images(BATCH + 3),
    )
    assert parity.images == BATCH + 3
    assert parity.relative_error == pytest.approx(error, rel=1e-4)
    assert parity.cosine == pytest.approx(cosine)


def test_sample_photos_are_real() -> None:
    photos = sample_photos()
    assert [photo.size for photo in photos] == [(640, 427), (640, 427)]
    assert all(len(np.unique(np.asarray(photo).reshape(-1, 3), axis=0)) > 5000 for photo in photos)


def test_photos_are_read_from_subfolders(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for index, name in enumerate(["a.jpg", "b.PNG", "below/c.webp"]):
        Image.new("L", (9, 9), 40 * index).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("nothing to see")
    photos = list(compared_photos(tmp_path))
    assert [photo.mode for photo in photos] == ["RGB"] * 3
    assert [first_value_of(photo) for photo in photos] == [0, 40, 80]


def test_broken_photo_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"not a photo")
    with pytest.raises(ConfigError, match=r"broken\.jpg"):
        list(compared_photos(tmp_path))


def test_photos_of_a_large_folder_are_compared_at_even_distances(tmp_path: Path) -> None:
    for shade in range(COMPARED + 50):
        Image.new("RGB", (1, 1), (shade, 0, 0)).save(tmp_path / f"{shade:03}.png")
    shades = [first_value_of(photo) for photo in compared_photos(tmp_path)]
    assert shades == list(range(0, COMPARED + 50, 2))
