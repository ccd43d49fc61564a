"""A backbone is converted to float16 for GPUs, or refused where its values do not fit."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor, nn

from aggregator.graphs.fused_model import fuse
from edge_client.runtime.backbone import open_backbone
from export.float16 import Float16, round_values
from export.to_onnx import export_module
from protocol.errors import ProtofleetError
from protocol.models.onnx_metadata import HeadMetadata, to_properties
from protocol.storage.blobstore import file_digest
from tests.support.graphs.torch_networks import EDGE, FEATURE_SIZE, described, tiny_network

IMAGES = np.random.default_rng(0).integers(0, 256, (5, EDGE, EDGE, 3), dtype=np.uint8)


class Scaled(nn.Module):
    """A network whose values between two layers are larger by a factor, which the features do not show."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        layers = list(tiny_network().children())
        self.first, self.second = nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:])
        self.factor = factor

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.second(self.first(images) * self.factor / self.factor)
        return features


def features_of(model: onnx.ModelProto) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    features: NDArray[np.float32] = session.run(["feature"], {"image": IMAGES})[0]
    return features


def test_file_is_opened_by_a_device_and_agrees_with_pytorch(tmp_path: Path) -> None:
    """Weights have half the bytes; images and features keep their types."""
    plain, path = tmp_path / "a.onnx", tmp_path / "b.onnx"
    export_module(tiny_network(), described(), path=plain)
    exported = export_module(tiny_network(), described(), path=path, convert=Float16().convert)
    metadata = exported.metadata
    assert metadata.precision == "float16"
    assert metadata.parity is not None
    assert metadata.parity.images == 2
    assert 0.99999 < metadata.parity.cosine < 1
    assert 1e-5 < metadata.parity.relative_error < 1e-2

    model = onnx.load(path)
    assert Counter(node.domain for node in model.graph.node) == {"": len(model.graph.node)}
    weights = {tensor.data_type for tensor in model.graph.initializer if tensor.name.endswith(".weight")}
    assert weights == {TensorProto.FLOAT16}
    backbone = open_backbone(path, provider="cpu", threads=1)
    assert backbone.metadata == metadata
    expected = open_backbone(plain, provider="cpu", threads=1).features(IMAGES)
    np.testing.assert_allclose(backbone.features(IMAGES), expected, rtol=2e-2, atol=1e-3)
    again = export_module(tiny_network(), described(), path=path, convert=Float16().convert)
    assert again.sha256 == exported.sha256


def test_values_are_rounded_as_on_a_gpu(tiny_file: bytes) -> None:
    """Features are float16 values, and PyTorch's of the network in float16, up to the order of sums."""
    features = features_of(round_values(onnx.load_from_string(tiny_file)))
    np.testing.assert_array_equal(features, features.astype(np.float16))
    assert (features != features_of(onnx.load_from_string(tiny_file))).any()
    mean, std = (torch.tensor(each).reshape(3, 1, 1) for each in (described().mean, described().std))
    pixels = (torch.from_numpy(IMAGES).permute(0, 3, 1, 2) / 255 - mean) / std
    with torch.inference_mode():
        expected = tiny_network().half()(pixels.half()).float().numpy()
    np.testing.assert_allclose(features, expected, rtol=2e-2, atol=1e-3)


def test_too_large_values_are_refused(tmp_path: Path) -> None:
    """ONNX Runtime may keep them in float32 on the CPU, where they fit."""
    path = tmp_path / "b.onnx"
    with pytest.raises(ProtofleetError, match=r"loses too much with float16.*at least 0\.999 .* got nan"):
        export_module(Scaled(60000.0), described(), path=path, convert=Float16().convert)
    assert not path.exists()
    export_module(Scaled(100.0), described(), path=path, convert=Float16().convert)
    with pytest.raises(ProtofleetError, match="at least 1 on 2 photos"):
        export_module(tiny_network(), described(), path=path, convert=Float16(min_cosine=1).convert)


def test_fused_model_has_the_features_of_the_backbone(tmp_path: Path) -> None:
    path = tmp_path / "b.onnx"
    export_module(tiny_network(), described(), path=path, convert=Float16().convert)
    nodes = [
        helper.make_node("Identity", ["feature"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    shape: list[str | int | None] = ["n", FEATURE_SIZE]
    values = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name in ("feature", "logits", "probabilities")
    }
    graph = helper.make_graph(nodes, "head", [values["feature"]], [values["logits"], values["probabilities"]])
    head = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    digest = file_digest(path).hex()
    classes = tuple(map(str, range(FEATURE_SIZE)))
    metadata = HeadMetadata(
        classes=classes,
        version=1,
        task="0" * 64,
        backbones=(digest,),
        feature_size=FEATURE_SIZE,
        training={},
    )
    helper.set_model_props(head, to_properties(metadata))
    session = onnxruntime.InferenceSession(fuse([path.read_bytes()], head.SerializeToString()))
    logits = session.run(["logits"], {"image": IMAGES})[0]
    np.testing.assert_array_equal(logits, features_of(onnx.load(path)))
