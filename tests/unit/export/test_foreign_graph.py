"""`export-backbone --from-onnx`: files in the shapes of other exporters become backbones, or one line says why not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from export.backbones import Choice
from export.foreign_graph import load_graph
from export.parity import sample_photos
from export.to_onnx import write_compared
from protocol.errors import ConfigError, ProtofleetError
from protocol.models.preprocessing import preprocess

EDGE, CHANNELS = 16, 4
CHOICE = Choice("", mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.5))
SIZED = Choice("", image_size=EDGE, mean=CHOICE.mean, std=CHOICE.std)
Dimension = int | str | None


def foreign(
    folder: Path,
    *,
    batch: Dimension = "N",
    layout: str = "NCHW",
    edge: Dimension = EDGE,
    channels: Dimension = 3,
    kind: int = TensorProto.FLOAT,
    opset: int = 18,
    end: Sequence[onnx.NodeProto] = (),
    extra_inputs: Sequence[str] = (),
    domain: str = "",
    ir_version: int = 8,
) -> Path:
    """Write a graph: a convolution of the input, `maps` (n, C, H, W), its mean `pooled` (n, C, 1, 1), and `end`."""
    weights = np.random.default_rng(0).normal(size=(CHANNELS, 3, 3, 3)).astype(np.float32)
    shape = [batch, channels, edge, edge] if layout == "NCHW" else [batch, edge, edge, channels]
    first = [] if layout == "NCHW" else [helper.make_node("Transpose", ["x"], ["nchw"], perm=[0, 3, 1, 2])]
    nodes = [
        *first,
        helper.make_node("Conv", ["nchw" if first else "x", "w"], ["maps"], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["maps"], ["pooled"]),
        *end,
    ]
    if domain:
        nodes.append(helper.make_node("Relu", ["pooled"], ["other"], domain=domain))
    constants = [
        numpy_helper.from_array(np.asarray(value), name)
        for name, value in {
            "w": weights, "flat": [1, -1], "row": [1, CHANNELS], "one": np.zeros((1, CHANNELS, 1, 1), np.float32),
            "always": True, "scale": np.float32(1),
        }.items()
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "foreign",
        [
            helper.make_tensor_value_info("x", kind, shape),
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in extra_inputs),
            *(as_input(tensor) for tensor in constants if ir_version < 4),
        ],
        [
            onnx.ValueInfoProto(
                name=nodes[-1].output[0], type=helper.make_tensor_type_proto(TensorProto.FLOAT, None)
            )
        ],
        constants,
    )
    opsets = [
        helper.make_opsetid("", opset),
        helper.make_opsetid("ai.onnx.ml", 2),
    ]  # tf2onnx imports more than it uses
    opsets += [helper.make_opsetid(domain, 1)] if domain else []
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
    onnx.save_model(model, path := folder / "foreign.onnx")
    return path


def as_input(tensor: TensorProto) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)


FLAT = helper.make_node("Reshape", ["pooled", "flat"], ["feature"])
"""As of exporters that fix the batch: its result is called as a backbone's."""

SCALED, NEGATIVE = (onnx.ValueInfoProto(name=name) for name in ("scaled", "negative"))
IF = helper.make_node(
    "If",
    ["always"],
    ["feature"],
    then_branch=helper.make_graph(
        [helper.make_node("Mul", ["pooled", "scale"], ["scaled"])], "then", [], [SCALED]
    ),
    else_branch=helper.make_graph(
        [helper.make_node("Neg", ["pooled"], ["negative"])], "else", [], [NEGATIVE]
    ),
)
"""Only its branches take `pooled`, and a constant whose name is that of a backbone's."""


def expected_features(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the features (n, C) of images (n, H, W, 3), by PyTorch."""
    torch = pytest.importorskip("torch")
    weights = np.random.default_rng(0).normal(size=(CHANNELS, 3, 3, 3)).astype(np.float32)
    normalized = (images / np.float32(255) - np.array(CHOICE.mean, np.float32)) / np.array(
        CHOICE.std, np.float32
    )
    maps = torch.nn.functional.conv2d(
        torch.from_numpy(normalized.transpose(0, 3, 1, 2).astype(np.float32)),
        torch.from_numpy(weights),
        stride=2,
    )
    means: NDArray[np.float32] = maps.mean(dim=(2, 3)).numpy()
    return means


@pytest.mark.parametrize(
    ("graph", "options"),
    [
        ({}, {}),
        ({"layout": "NHWC"}, {}),
        ({"batch": 1, "end": [FLAT]}, {}),
        ({"batch": 1, "layout": "NHWC", "opset": 11, "end": [FLAT]}, {}),
        ({"batch": -1, "edge": None, "opset": 9}, {"size": EDGE}),
        ({"end": [helper.make_node("Softmax", ["pooled"], ["classes"])]}, {"feature": "pooled"}),
        ({}, {"feature": "maps", "pool": True}),
        ({"extra_inputs": ["rate"]}, {"image": "x"}),
        ({"opset": 9, "ir_version": 3}, {}),
        ({"end": [IF]}, {}),
        ({"batch": None, "channels": None, "edge": None}, {"size": EDGE}),
    ],
    ids=[
        "4-D",
        "NHWC",
        "fixed batch",
        "old",
        "dynamic",
        "before the classes",
        "pooled here",
        "two inputs",
        "constants are inputs",
        "If",
        "all open",
    ],
)
def test_files_in_shapes_of_other_exporters_are_backbones(
    tmp_path: Path, graph: dict[str, Any], options: dict[str, Any]
) -> None:
    """Any number of images gets the features of PyTorch; devices accept the file, and it records its parity."""
    path = foreign(tmp_path, **graph)
    choice = Choice("", mean=CHOICE.mean, std=CHOICE.std, image_size=options.pop("size", None))
    candidate = load_graph(path, choice, **{"image": None, "feature": None, "pool": False, **options})
    made = write_compared(candidate, path=tmp_path / "backbone.onnx")
    assert made.metadata.parity is not None
    assert made.metadata.parity.relative_error < 1e-5
    assert (made.metadata.model, made.metadata.weights, made.metadata.feature_size) == (
        *("foreign", "foreign.onnx"), CHANNELS
    )  # fmt: skip
    assert candidate.assumed == ("interpolation", "crop_pct", "crop_mode")
    images = np.stack([preprocess(photo, made.metadata.preprocessing) for photo in sample_photos()])
    session = onnxruntime.InferenceSession(made.path)
    for count in (1, 2):
        (features,) = session.run(["feature"], {"image": images[:count]})
        np.testing.assert_allclose(features, expected_features(images[:count]), rtol=1e-4, atol=1e-5)


def test_preprocessing_is_read_from_beside_the_file(tmp_path: Path) -> None:
    path = foreign(tmp_path, edge=None)
    config = {
        "input_size": [3, EDGE, EDGE],
        "mean": CHOICE.mean,
        "std": CHOICE.std,
        "interpolation": "bilinear",
    }
    (tmp_path / "config.json").write_bytes(
        msgspec.json.encode({"architecture": "other", "pretrained_cfg": config})
    )
    candidate = load_graph(path, Choice("", crop_pct=0.9), image=None, feature=None, pool=False)
    spec = candidate.metadata.preprocessing
    assert (spec.height, spec.interpolation, spec.crop_pct, candidate.assumed) == (
        *(EDGE, "bilinear", 0.9), ("crop_mode",)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("graph", "options", "error"),
    [
        ({}, {"choice": Choice("", image_size=EDGE)}, "is not known: give --mean, --std of its training"),
        ({"edge": None}, {}, "give --image-size of its training"),
        ({"channels": 1}, {}, r"input 'x' .* is FLOAT \(any, 1, 16, 16\): expected FLOAT \(n, 3, H, W\) or"),
        ({"kind": TensorProto.UINT8}, {}, "is UINT8"),
        ({}, {"feature": "map"}, "no tensor 'map' for --output; did you mean maps"),
        ({}, {"feature": "zzz"}, "no tensor 'zzz' for --output; it has pooled; a viewer"),
        ({"extra_inputs": ["rate"]}, {}, "has the inputs x, rate: give the one for images with --input"),
        ({}, {"image": "y"}, "no input 'y' for --input; it has x"),
        ({}, {"feature": "maps"}, r"is \(any, 4, 7, 7\), not \(n, L\): --pool averages"),
        (
            {"extra_inputs": ["rate"], "end": [helper.make_node("Mul", ["pooled", "rate"], ["feature"])]},
            {"image": "x"},
            "cannot compute 'feature' from 'x' alone: .*rate",
        ),
        ({"domain": "com.microsoft"}, {}, "no device would run foreign.onnx: .* 'com.microsoft'"),
        ({"end": [helper.make_node("RandomNormalLike", ["pooled"], ["feature"])]}, {}, "random operator"),
        ({"end": [helper.make_node("Shape", ["pooled"], ["feature"])]}, {}, "is int64: expected float32"),
        (
            {"batch": 1, "end": [helper.make_node("Concat", ["pooled", "one"], ["feature"], axis=1)]},
            {},
            "takes batches of 1 only, and devices give others: export it with a dynamic batch axis",
        ),
        (
            {"end": [helper.make_node("Reshape", ["pooled", "row"], ["feature"])]},
            {},
            "takes batches of 1 only, and devices give others: export it with a dynamic batch axis",
        ),
        ({"channels": None, "edge": None, "layout": "NHWC"}, {"choice": SIZED}, "fails on an image of 16x16"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, graph: dict[str, Any], options: dict[str, Any], error: str
) -> None:
    path = foreign(tmp_path, **graph)
    given = {"choice": CHOICE, "image": None, "feature": None, "pool": False, **options}
    with pytest.raises(ConfigError, match=error):
        load_graph(path, given.pop("choice"), **given)


def test_another_size_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    """Tensors in a file beside it are read; without that file there is an error."""
    path = foreign(tmp_path)
    other = Choice("", image_size=32, mean=CHOICE.mean, std=CHOICE.std)
    with pytest.raises(
        ConfigError, match="takes images of 16x16, not of 32x32: give another --image-size or none"
    ):
        load_graph(path, other, image=None, feature=None, pool=False)
    onnx.save_model(
        onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    assert load_graph(path, CHOICE, image=None, feature=None, pool=False).metadata.feature_size == CHANNELS
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ConfigError, match="is no ONNX file with all its tensors"):
        load_graph(path, CHOICE, image=None, feature=None, pool=False)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"foreign\.onnx has no input"):
        load_graph(path, CHOICE, image=None, feature=None, pool=False)


def test_a_file_that_differs_is_not_written(tmp_path: Path) -> None:
    candidate = load_graph(foreign(tmp_path), CHOICE, image=None, feature=None, pool=False)
    with pytest.raises(ProtofleetError, match=r"foreign differs between ONNX Runtime and foreign\.onnx"):
        write_compared(candidate, path=tmp_path / "backbone.onnx", tolerance=-1.0)
    assert not (tmp_path / "backbone.onnx").exists()
