"""Small ONNX backbones for tests."""

import hashlib
from collections.abc import Callable

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

from protocol.models.onnx_metadata import BackboneMetadata, Block, to_properties
from protocol.models.preprocessing import Preprocessing

EDGE = 8
"""Height and width of its images, pixels."""

EIGHT = Preprocessing(height=EDGE, width=EDGE)


def tiny_backbone(*, feature_size: int = 16, seed: int = 0, preprocessing: Preprocessing = EIGHT) -> bytes:
    """Return a backbone file, `image` uint8 (n, H, W, 3) -> `feature` float32 (n, L).

    It averages 2 x 2 patches and projects them randomly; another `seed` is another backbone.
    """
    height, width = preprocessing.height, preprocessing.width
    values = 3 * (height // 2) * (width // 2)
    weights = np.random.default_rng(seed).normal(size=(values, feature_size)).astype(np.float32)
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        tiny (uint8[n, {height}, {width}, 3] image) => (float[n, {feature_size}] feature)
        {{
            pixels = Cast<to = 1>(image)
            scaled = Div(pixels, white)
            planes = Transpose<perm = [0, 3, 1, 2]>(scaled)
            patches = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(planes)
            flat = Flatten(patches)
            feature = MatMul(flat, projection)
        }}""")
    white = numpy_helper.from_array(np.array(255, dtype=np.float32), "white")
    model.graph.initializer.extend([white, numpy_helper.from_array(weights, "projection")])
    helper.set_model_props(
        model, to_properties(tiny_metadata(weights.tobytes(), feature_size, preprocessing))
    )
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def changed(file: bytes, change: Callable[[onnx.ModelProto], object]) -> bytes:
    """Return an ONNX file with a change."""
    model = onnx.load_model_from_string(file)
    change(model)
    return bytes(model.SerializeToString())


def without_metadata(file: bytes) -> bytes:
    """Return an ONNX file without its metadata, such as a head's version."""
    return changed(file, lambda model: model.ClearField("metadata_props"))


def tiny_metadata(
    weights: bytes = b"", feature_size: int = 16, preprocessing: Preprocessing = EIGHT
) -> BackboneMetadata:
    """Return the metadata of a backbone that `tiny_backbone` makes of these weights."""
    return BackboneMetadata(
        model="tiny",
        feature_size=feature_size,
        preprocessing=preprocessing,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        weights_sha256=hashlib.sha256(weights).hexdigest(),
    )


def block_backbone(*, seed: int = 0) -> bytes:
    """Return a backbone file whose feature is four blocks: `last`, which knows the brightness only, and three others.

    The others project the parts of normalized pixels that are above 0; mean and deviation are 0.5.
    """
    widths = {"c8": 8, "blocks.1": 16, "c12": 12, "last": 4}
    random = np.random.default_rng(seed)
    arrays = {name: random.normal(size=(48, width)) for name, width in widths.items()}
    arrays["last"] = np.ones((48, 1)) @ random.normal(size=(1, 4))
    names = {name: name.replace(".", "_") for name in widths}
    blocks = "\n".join(
        f"{name}_raw = MatMul(flat, {name}_weights)\n{name} = LayerNormalization({name}_raw, {name}_ones)"
        for name in names.values()
    )
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        blocks (uint8[n, {EDGE}, {EDGE}, 3] image) => (float[n, {sum(widths.values())}] feature)
        {{
            planes = Transpose<perm = [0, 3, 1, 2]>(image)
            pixels = Cast<to = 1>(planes)
            normalized = Div(pixels, half_white)
            centered = Sub(normalized, one)
            rectified = Relu(centered)
            patches = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(rectified)
            flat = Flatten(patches)
            {blocks}
            feature = Concat<axis = 1>({", ".join(names.values())})
        }}""")
    constants = {"half_white": np.array(127.5), "one": np.array(1.0)}
    for name, plain in names.items():
        constants |= {f"{plain}_weights": arrays[name], f"{plain}_ones": np.ones(widths[name])}
    model.graph.initializer.extend(
        numpy_helper.from_array(values.astype(np.float32), name) for name, values in constants.items()
    )
    metadata = BackboneMetadata(
        model="blocks",
        feature_size=sum(widths.values()),
        preprocessing=EIGHT,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        weights_sha256=hashlib.sha256(arrays["c8"].tobytes()).hexdigest(),
        blocks=tuple(
            Block(name=name, width=width, residual=name == "blocks.1") for name, width in widths.items()
        ),
    )
    helper.set_model_props(model, to_properties(metadata))
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())
