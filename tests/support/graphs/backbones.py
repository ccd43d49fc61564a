"""Small ONNX backbones for tests."""

import hashlib

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

from protocol.models.onnx_metadata import BackboneMetadata, to_properties
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
