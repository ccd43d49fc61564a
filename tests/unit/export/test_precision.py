"""A backbone is converted to 8 bits or float16, or refused where it loses too much."""

import hashlib
import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from PIL import Image
from torch import Tensor, nn

from edge_client.graphs.backbone import open_backbone
from export.float16 import Float16, round_values
from export.int8 import MIN_PHOTOS, Int8
from export.quantization import layer_names, stem
from export.to_onnx import export_module, to_onnx
from protocol.errors import ConfigError, ProtofleetError
from protocol.models.preprocessing import preprocess
from tests.support.graphs.torch_networks import EDGE, FEATURE_SIZE, described, tiny_network

PHOTOS = 15


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smooth photos: a coarse grid of colors, enlarged."""
    folder = tmp_path_factory.mktemp("photos")
    for index in range(PHOTOS):
        grid = np.random.default_rng(index).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(grid).resize((40, 30), Image.Resampling.BICUBIC).save(folder / f"{index:02}.png")
    return folder


def mobile_network() -> nn.Module:
    """A stem, a depthwise layer and two dense ones, with a residual."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(16, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.relu(self.conv(x))

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.ReLU6(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ReLU6(),
        nn.Conv2d(8, 16, 1),
        Residual(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, FEATURE_SIZE),
    ).eval()


@pytest.fixture(scope="module")
def mobile_file() -> bytes:
    return to_onnx(mobile_network(), described())


def convert(file: bytes, settings: Int8) -> onnx.ModelProto:
    """Quantize a file; the reference is the file itself."""
    session = onnxruntime.InferenceSession(file)

    def reference(photo: Image.Image) -> NDArray[np.float32]:
        image = preprocess(photo, described().preprocessing)
        feature: NDArray[np.float32] = session.run(["feature"], {"image": image[None]})[0][0]
        return feature

    return settings.convert(file, described(), reference)[0]


def test_file_is_opened_by_a_device_and_agrees_with_pytorch(tmp_path: Path, photos: Path) -> None:
    """One in five photos is held out for the comparison; features do not depend on the batch."""
    path = tmp_path / "b.onnx"
    exported = export_module(mobile_network(), described(), path=path, convert=Int8(photos).convert)
    metadata = exported.metadata
    assert metadata.precision == "int8"
    assert metadata.parity is not None
    assert metadata.parity.images == PHOTOS / 5
    assert 0.99 < metadata.parity.cosine < 1
    assert metadata.parity.relative_error > 1e-3

    model = onnx.load(path)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
    assert Counter(node.domain for node in model.graph.node) == {"": len(model.graph.node)}
    backbone = open_backbone(path, provider="cpu", threads=1)
    assert backbone.metadata == metadata
    images = np.random.default_rng(0).integers(0, 256, (5, EDGE, EDGE, 3), dtype=np.uint8)
    together = backbone.features(images)
    singly = np.concatenate([backbone.features(image[None]) for image in images])
    np.testing.assert_array_equal(together, singly)


def weights_of(model: onnx.ModelProto) -> dict[str, int]:
    """The types of the tensors with at least two axes or eight values, by name."""
    return {
        tensor.name.removesuffix("_quantized"): tensor.data_type
        for tensor in model.graph.initializer
        if len(tensor.dims) > 1
    }


def test_weights_have_a_scale_per_channel_and_the_stem_none(mobile_file: bytes, photos: Path) -> None:
    """The first layer and the depthwise one after it do the most harm in mobile networks."""
    model = onnx.load_from_string(mobile_file)
    assert list(layer_names(model)) == ["0", "2", "4", "5.conv", "8"]
    assert stem(model) == ["0", "2"]
    made = convert(mobile_file, Int8(photos))
    types = {name: kind for name, kind in weights_of(made).items() if name.endswith(".weight")}
    float32, int8 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT8
    assert types == {
        "module.0.weight": float32,
        "module.2.weight": float32,
        "module.4.weight": int8,
        "module.5.conv.weight": int8,
        "module.8.weight": int8,
    }
    scales = {tensor.name: list(tensor.dims) for tensor in made.graph.initializer}
    assert scales["module.5.conv.weight_scale"] == [16]
    # Pixels are not rounded twice: what normalizes them is left alone.
    first = next(node for node in made.graph.node if node.op_type in {"QuantizeLinear", "Conv"})
    assert first.op_type == "Conv"


def test_first_layer_without_a_depthwise_one_after_it_is_quantized(tiny_file: bytes) -> None:
    assert stem(onnx.load_from_string(tiny_file)) == []


def test_layers_can_be_kept_in_float32(mobile_file: bytes, photos: Path) -> None:
    types = weights_of(convert(mobile_file, Int8(photos, float_layers=("5.conv",))))
    assert types["module.4.weight"] == onnx.TensorProto.INT8
    assert types["module.5.conv.weight"] == onnx.TensorProto.FLOAT


def test_unknown_layer_is_refused_with_close_names(mobile_file: bytes, photos: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no layer '5\.con'; did you mean 5\.conv\?"):
        convert(mobile_file, Int8(photos, float_layers=("5.con",)))


def spread_out() -> nn.Module:
    """A network whose layer 4 has one channel 3,000 times as large as the others, which layer 5 adds to itself."""
    network = mobile_network()
    weights = dict(network.named_parameters())
    with torch.no_grad():
        weights["4.weight"][0] *= 3000
        weights["5.conv.weight"][:, 0] = 0
        weights["8.weight"][:, 0] = 0
    return network


def test_network_that_loses_too_much_is_refused_with_its_layers(tmp_path: Path, photos: Path) -> None:
    """The layers around the tensor that is to blame are named. Their order depends on the processor (VNNI)."""
    layer = r"(4|5\.conv|8) \([\d.]+\)"
    with pytest.raises(
        ProtofleetError,
        match=rf"at least 0\.99 on 3 held-out photos, got .*one quantized: {layer}, {layer}, {layer};.*--float-layer",
    ):
        export_module(
            spread_out(), described(), path=tmp_path / "b.onnx", convert=Int8(photos, min_cosine=0.99).convert
        )
    assert list(tmp_path.iterdir()) == []


def test_few_photos_are_refused(mobile_file: bytes, tmp_path: Path, photos: Path) -> None:
    few = tmp_path / "few"
    few.mkdir()
    for source in itertools.islice(photos.iterdir(), MIN_PHOTOS - 1):
        (few / source.name).write_bytes(source.read_bytes())
    with pytest.raises(ConfigError, match=r"at least 10 photos in .*few, got 9"):
        convert(mobile_file, Int8(few))


def test_same_file_and_photos_give_the_same_bytes(mobile_file: bytes, tmp_path: Path, photos: Path) -> None:
    """Whatever the order of Python's sets is."""
    (tmp_path / "source.onnx").write_bytes(mobile_file)
    digests = {
        subprocess.run(
            [sys.executable, "-m", __name__, str(tmp_path / "source.onnx"), str(photos)],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


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


def test_float16_file_is_opened_by_a_device_and_agrees_with_pytorch(tmp_path: Path) -> None:
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


if __name__ == "__main__":
    quantized = convert(Path(sys.argv[1]).read_bytes(), Int8(Path(sys.argv[2])))
    sys.stdout.write(hashlib.sha256(quantized.SerializeToString(deterministic=True)).hexdigest())
