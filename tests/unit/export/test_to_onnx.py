"""A torch network becomes one ONNX file, or there is no file."""

import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from export.to_onnx import OPSET, export_module, to_onnx
from protocol.errors import ProtofleetError, StateError
from protocol.models.onnx_metadata import BackboneMetadata, read_metadata
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


def test_opset_can_be_chosen(tiny_file: bytes) -> None:
    for file, opset in ((tiny_file, OPSET), (to_onnx(tiny_network(), described(), opset=20), 20)):
        model = onnx.load_from_string(file)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", opset)]


def test_unsupported_opset_is_refused() -> None:
    with pytest.raises(ProtofleetError, match="cannot export tiny at opset 99"):
        to_onnx(tiny_network(), described(), opset=99)


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
