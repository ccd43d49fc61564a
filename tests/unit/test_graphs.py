"""The graph that other tests stand on does what it says."""

import numpy as np
import onnxruntime

from protocol.onnx_metadata import BackboneMetadata, read_metadata
from tests.support.graphs import EDGE, tiny_backbone


def test_the_tiny_backbone_runs_and_tells_what_it_is() -> None:
    """ONNX Runtime gives a feature per image, different images differ, and the metadata is there."""
    session = onnxruntime.InferenceSession(tiny_backbone(feature_size=5), providers=["CPUExecutionProvider"])
    images = np.random.default_rng(0).integers(0, 256, (3, EDGE, EDGE, 3), dtype=np.uint8)
    (feature,) = session.run(["feature"], {"image": images})
    assert feature.shape == (3, 5)
    assert feature.dtype == np.float32
    assert not np.allclose(feature[0], feature[1])
    assert read_metadata(session.get_modelmeta().custom_metadata_map, BackboneMetadata).feature_size == 5


def test_the_seed_makes_the_backbone() -> None:
    """The same seed gives the same file, another seed another one."""
    assert tiny_backbone(seed=1) == tiny_backbone(seed=1)
    assert tiny_backbone(seed=1) != tiny_backbone(seed=2)
