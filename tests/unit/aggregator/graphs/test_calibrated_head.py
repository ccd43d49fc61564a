"""A calibrated head in ONNX Runtime computes its calibration, alone and after its backbone."""

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from aggregator.algorithms.confidence import MIN_LEAD, ConfidenceMap, calibrated, fit_map
from aggregator.algorithms.fedtc.head import Dense
from aggregator.graphs.calibrated_head import logits_and_probabilities, max_difference, with_calibration
from aggregator.graphs.fused_model import fuse
from aggregator.graphs.head_export import head_to_onnx
from protocol.errors import ProtofleetError
from protocol.models.onnx_metadata import HeadMetadata, read_metadata
from tests.support.graphs.backbones import tiny_backbone
from tests.support.messages.evaluations import COUNTS, softmax
from tests.unit.aggregator.graphs.test_head_export import (
    CLASSES,
    FEATURE_SIZE,
    described,
    network,
    random_features,
    random_images,
)

CONFIDENCE = ConfidenceMap(np.array([-1, 2, 5, 9], np.float32), np.array([-1.5, 0.5, 0.5, 3], np.float32))


@pytest.fixture(scope="module")
def backbone() -> bytes:
    return tiny_backbone(feature_size=FEATURE_SIZE)


@pytest.fixture(scope="module")
def head(backbone: bytes) -> bytes:
    return head_to_onnx(network(), metadata=described(backbone))


def test_file_computes_the_calibration(head: bytes) -> None:
    """With the weights of the head before; its metadata name the version, and the figures of both."""
    file = with_calibration(head, CONFIDENCE, version=5, figures={"calibrated_from": 4.0})
    features = random_features(400)
    before, _ = logits_and_probabilities(head, features)
    logits, probabilities = logits_and_probabilities(file, features)
    np.testing.assert_allclose(logits, calibrated(before, CONFIDENCE), atol=1e-5)
    np.testing.assert_allclose(probabilities, softmax(logits), atol=1e-6)
    assert not np.allclose(logits, before, atol=0.1)
    assert max_difference(head, file, CONFIDENCE, features) < 1e-5
    properties = {each.key: each.value for each in onnx.load_from_string(file).metadata_props}
    metadata = read_metadata(properties, HeadMetadata)
    assert (metadata.version, metadata.training) == (5, {"loss": 0.25, "calibrated_from": 4.0})
    weights = {each.name: each for each in onnx.load_from_string(head).graph.initializer}
    kept = {each.name: each for each in onnx.load_from_string(file).graph.initializer if each.name in weights}
    assert kept == weights


def test_another_map_differs(head: bytes) -> None:
    """And so does another head, also if only the best class is another."""
    file = with_calibration(head, CONFIDENCE, version=5, figures={})
    other = ConfidenceMap(CONFIDENCE.inputs, CONFIDENCE.outputs + np.float32(0.1))
    assert max_difference(head, file, other, random_features(50)) > 1e-3
    stranger = head_to_onnx(network(seed=1), metadata=described(b""))
    assert max_difference(stranger, file, CONFIDENCE, random_features(50)) == float("inf")


def test_fused_file_is_calibrated(head: bytes, backbone: bytes) -> None:
    file = with_calibration(head, CONFIDENCE, version=5, figures={})
    images = random_images(30)
    (features,) = onnxruntime.InferenceSession(backbone).run(["feature"], {"image": images})
    session = onnxruntime.InferenceSession(fuse([backbone], file))
    logits, probabilities = session.run(["logits", "probabilities"], {"image": images})
    expected = logits_and_probabilities(file, features)
    np.testing.assert_allclose(logits, expected[0], atol=1e-4)
    np.testing.assert_allclose(probabilities, expected[1], atol=1e-5)


def test_head_is_calibrated_once(head: bytes, backbone: bytes) -> None:
    """One with a single class never."""
    alone = msgspec.structs.replace(described(backbone), classes=("ant",))
    layer = Dense(np.ones((1, FEATURE_SIZE), np.float32), np.zeros(1, np.float32))
    again = with_calibration(head, CONFIDENCE, version=5, figures={})
    for file in (again, head_to_onnx([layer], metadata=alone)):
        with pytest.raises(ProtofleetError, match="several classes that is not calibrated"):
            with_calibration(file, CONFIDENCE, version=6, figures={})


TAKES_LOGITS = HeadMetadata(
    classes=CLASSES, version=1, task="a" * 64, backbones=("b" * 64,), feature_size=len(CLASSES), training={}
)
IDENTITY = [Dense(np.eye(len(CLASSES), dtype=np.float32), np.zeros(len(CLASSES), np.float32))]


@settings(max_examples=40)
@given(
    arrays(
        np.float32, (7, len(CLASSES)), elements=st.floats(-50, 50, width=32) | st.sampled_from([0.0, 1.0])
    ),
    COUNTS,
)
def test_prediction_never_changes(logits: NDArray[np.float32], counts: tuple[list[int], list[int]]) -> None:
    """In ONNX Runtime, of any logits and for any counts; of equal classes the first one."""
    before = head_to_onnx(IDENTITY, metadata=TAKES_LOGITS)
    confidence = fit_map(*map(np.array, counts), classes=len(CLASSES))
    after = with_calibration(before, confidence, version=2, figures={})
    _, old = logits_and_probabilities(before, logits)
    made, new = logits_and_probabilities(after, logits)
    assert (new.argmax(axis=1) == old.argmax(axis=1)).all()
    np.testing.assert_allclose(new.sum(axis=1), 1, atol=1e-5)
    first, second = np.sort(logits, axis=1)[:, :-3:-1].T
    clear = np.abs(first - second - MIN_LEAD) > 1e-4  # on which side of it a row is, is a matter of rounding
    np.testing.assert_allclose(made[clear], calibrated(logits, confidence)[clear], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("middle", [0.0, 1e4, 1e5])
def test_prediction_of_large_logits_does_not_change(middle: float) -> None:
    """There is no float32 that is a thousandth above such a logit: the best one stays as it is."""
    logits = middle + np.random.default_rng(0).normal(size=(500, len(CLASSES))).astype(np.float32)
    low = ConfidenceMap(np.array([-4, 12], np.float32), np.array([-9, -8], np.float32))
    before = head_to_onnx(IDENTITY, metadata=TAKES_LOGITS)
    after = with_calibration(before, low, version=2, figures={})
    made, _ = logits_and_probabilities(after, logits)
    assert (made.argmax(axis=1) == logits.argmax(axis=1)).all()
    assert (calibrated(logits, low).argmax(axis=1) == logits.argmax(axis=1)).all()
