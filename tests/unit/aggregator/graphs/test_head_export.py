"""A head in ONNX Runtime computes its layers and its calibration, alone and after its backbone."""

import hashlib
import itertools
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from onnx import version_converter

from aggregator.algorithms.confidence import MIN_LEAD, ConfidenceMap, calibrated, fit_map
from aggregator.algorithms.fedtc.head import Dense, compress, logits_of
from aggregator.algorithms.novelty import ClassDirections, class_directions
from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.graphs import calibrated_head
from aggregator.graphs.calibrated_head import logits_and_probabilities, with_calibration
from aggregator.graphs.fused_model import fuse
from aggregator.graphs.head_export import OPSET, head_to_onnx, max_difference
from protocol.errors import BackboneMismatch, ProtofleetError
from protocol.models.onnx_metadata import HeadMetadata, ModelMetadata, read_metadata
from protocol.models.preprocessing import Preprocessing
from tests.support.graphs.backbones import EDGE, tiny_backbone
from tests.support.graphs.heads import head_metadata
from tests.support.messages.evaluations import COUNTS, softmax

FEATURE_SIZE = 16
CLASSES = ("ant", "bee", "crow", "dog", "elk")


def network(*, seed: int = 0) -> list[Dense]:
    """A narrow adapter and head."""
    random = np.random.default_rng(seed)
    sizes = itertools.pairwise((FEATURE_SIZE, 64, 32, len(CLASSES)))
    return [
        Dense(
            random.normal(size=(after, before)).astype(np.float32),
            random.normal(size=after).astype(np.float32),
        )
        for before, after in sizes
    ]


def described(*backbones: bytes) -> HeadMetadata:
    """Return the metadata of a head for these backbones."""
    return head_metadata(*backbones, classes=CLASSES, version=4, training={"loss": 0.25})


def random_features(count: int) -> NDArray[np.float32]:
    """(count, L)."""
    return np.random.default_rng(count).normal(size=(count, FEATURE_SIZE)).astype(np.float32)


def random_images(count: int) -> NDArray[np.uint8]:
    """(count, H, W, 3)."""
    return np.random.default_rng(count).integers(0, 256, (count, EDGE, EDGE, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def backbone() -> bytes:
    """A backbone file."""
    return tiny_backbone(feature_size=FEATURE_SIZE)


@pytest.fixture(scope="module")
def head(backbone: bytes) -> bytes:
    """A head file for it."""
    return head_to_onnx(network(), metadata=described(backbone))


def test_head_has_names_types_and_metadata(backbone: bytes, head: bytes) -> None:
    """For any number of rows."""
    session = onnxruntime.InferenceSession(head)
    (feature,), outputs = session.get_inputs(), session.get_outputs()
    assert (feature.name, feature.type, feature.shape) == ("feature", "tensor(float)", ["n", FEATURE_SIZE])
    assert [(output.name, output.type, output.shape) for output in outputs] == [
        ("logits", "tensor(float)", ["n", len(CLASSES)]),
        ("probabilities", "tensor(float)", ["n", len(CLASSES)]),
    ]
    assert read_metadata(session.get_modelmeta().custom_metadata_map, HeadMetadata) == described(backbone)
    assert onnx.load_model_from_string(head).opset_import[0].version == OPSET


def test_file_equals_its_layers(head: bytes) -> None:
    """Logits and probabilities for 1, 3 and 400 rows; probabilities sum to 1."""
    session = onnxruntime.InferenceSession(head)
    for count in (1, 3, 400):
        features = random_features(count)
        expected = logits_of(network(), features)
        logits, probabilities = session.run(["logits", "probabilities"], {"feature": features})
        np.testing.assert_allclose(logits, expected, atol=1e-5)
        odds = np.exp(expected - expected.max(axis=1, keepdims=True))
        np.testing.assert_allclose(probabilities, odds / odds.sum(axis=1, keepdims=True), atol=1e-5)
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)


def test_probabilities_of_zeros_are_finite(head: bytes) -> None:
    """No division by zero."""
    zeros = np.zeros((2, FEATURE_SIZE), dtype=np.float32)
    assert np.isfinite(onnxruntime.InferenceSession(head).run(["probabilities"], {"feature": zeros})[0]).all()


def test_same_head_has_the_same_bytes(backbone: bytes, head: bytes) -> None:
    """They contain no path of this machine."""
    assert head_to_onnx(network(), metadata=described(backbone)) == head
    assert b".py" not in head
    assert str(Path.cwd()).encode() not in head


def test_difference_is_small_only_for_the_same_head(backbone: bytes, head: bytes) -> None:
    """Another module differs."""
    assert max_difference(network(), head, random_features(5)) < 1e-5
    assert max_difference(network(seed=1), head, random_features(5)) > 1e-2


@pytest.mark.parametrize("depth", [1, 3])
def test_every_constant_of_a_head_is_used(backbone: bytes, depth: int) -> None:
    """ONNX Runtime would print a warning for each other one, wherever the head is used."""
    layers = [Dense(np.eye(FEATURE_SIZE, dtype=np.float32), np.zeros(FEATURE_SIZE, np.float32))] * (depth - 1)
    last = Dense(np.zeros((len(CLASSES), FEATURE_SIZE), np.float32), np.zeros(len(CLASSES), np.float32))
    graph = onnx.load_model_from_string(head_to_onnx([*layers, last], metadata=described(backbone))).graph
    used = {name for node in graph.node for name in node.input}
    assert {constant.name for constant in graph.initializer} <= used


def test_nan_is_an_infinite_difference(head: bytes) -> None:
    """It never passes as agreement."""
    features = random_features(3)
    features[1, 2] = np.nan
    assert max_difference(network(), head, features) == float("inf")


def _directions(size: int, *, scaled: bool = False) -> ClassDirections:
    random = np.random.default_rng(1)
    factors = random.uniform(0.1, 1, size).astype(np.float32) if scaled else None
    return class_directions(random.normal(size=(4, size)), factors)


@pytest.mark.parametrize("columns", [None, [1, 3, 8]])
@pytest.mark.parametrize("scaled", [False, True])
def test_file_has_the_novelty_of_the_selected_features(
    backbone: bytes, columns: list[int] | None, *, scaled: bool
) -> None:
    """Zeros have the novelty 1; a difference is found."""
    chosen = None if columns is None else np.array(columns)
    size = FEATURE_SIZE if columns is None else len(columns)
    layers = [Dense(np.ones((len(CLASSES), size), np.float32), np.zeros(len(CLASSES), np.float32))]
    directions = _directions(size, scaled=scaled)
    file = head_to_onnx(layers, metadata=described(backbone), columns=chosen, directions=directions)
    features = np.concatenate([random_features(20), np.zeros((1, FEATURE_SIZE), np.float32)])
    assert max_difference(layers, file, features, columns=chosen, directions=directions) < 1e-5
    other = _directions(size, scaled=not scaled)
    assert max_difference(layers, file, features, columns=chosen, directions=other) > 1e-3
    if chosen is not None:
        assert max_difference(layers, file, features, columns=chosen + 1, directions=directions) > 0.1
    fused = onnxruntime.InferenceSession(fuse([backbone], file))
    assert [each.name for each in fused.get_outputs()] == ["probabilities", "logits", "novelty"]
    (novelty,) = onnxruntime.InferenceSession(file).run(["novelty"], {"feature": features})
    assert novelty.shape == (21,)
    assert novelty[-1] == 1


@pytest.mark.parametrize("random_size", [0, 64])
def test_file_has_the_novelty_of_the_rows_of_a_map(backbone: bytes, random_size: int) -> None:
    """Without their random features."""
    feature_map = FeatureMap(feature_size=FEATURE_SIZE, random_features=random_size, seed=0)
    rows = FEATURE_SIZE + random_size
    layers = [Dense(np.ones((len(CLASSES), rows), np.float32), np.zeros(len(CLASSES), np.float32))]
    directions = _directions(FEATURE_SIZE)
    file = head_to_onnx(layers, metadata=described(backbone), feature_map=feature_map, directions=directions)
    assert max_difference(layers, file, random_features(20), feature_map, directions=directions) < 1e-5


@pytest.mark.parametrize("opset", [17, OPSET, 20])
def test_fused_file_equals_backbone_and_head(head: bytes, backbone: bytes, opset: int) -> None:
    """This holds for backbones of several operator sets."""
    other = version_converter.convert_version(onnx.load_model_from_string(backbone), opset)
    file = bytes(other.SerializeToString())
    head_of_it = head_to_onnx(network(), metadata=described(file))
    fused = onnxruntime.InferenceSession(fuse([file], head_of_it))

    assert [entry.name for entry in fused.get_inputs()] == ["image"]
    rows = ("tensor(float)", ["n", len(CLASSES)])
    outputs = [(entry.name, entry.type, entry.shape) for entry in fused.get_outputs()]
    assert outputs == [("probabilities", *rows), ("logits", *rows)]
    for count in (1, 4):
        (features,) = onnxruntime.InferenceSession(file).run(["feature"], {"image": random_images(count)})
        expected = onnxruntime.InferenceSession(head).run(["logits", "probabilities"], {"feature": features})
        given = fused.run(["logits", "probabilities"], {"image": random_images(count)})
        for ours, theirs in zip(given, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_fused_file_equals_several_backbones_and_head() -> None:
    """Of other image sizes, operator sets and numbers of features; the metadata describes each input."""
    preprocessing = [Preprocessing(height=8, width=8), Preprocessing(height=4, width=12, crop_pct=0.9)]
    first, second = (
        tiny_backbone(feature_size=size, preprocessing=each)
        for size, each in zip((6, FEATURE_SIZE - 6), preprocessing, strict=True)
    )
    second = bytes(
        version_converter.convert_version(onnx.load_model_from_string(second), 20).SerializeToString()
    )
    head = head_to_onnx(network(), metadata=described(first, second))
    fused = onnxruntime.InferenceSession(fuse([first, second], head))

    random = np.random.default_rng(0)
    images = {
        f"backbone_{number}/image": random.integers(0, 256, (3, spec.height, spec.width, 3), dtype=np.uint8)
        for number, spec in enumerate(preprocessing, start=1)
    }
    assert [entry.name for entry in fused.get_inputs()] == list(images)
    properties = fused.get_modelmeta().custom_metadata_map
    metadata = read_metadata(properties, ModelMetadata)
    assert (metadata.head, list(properties)) == (described(first, second), ["protofleet"])
    assert {name: each.preprocessing for name, each in metadata.backbones.items()} == dict(
        zip(images, preprocessing, strict=True)
    )
    features = [
        onnxruntime.InferenceSession(file).run(None, {"image": batch})[0]
        for file, batch in zip((first, second), images.values(), strict=True)
    ]
    logits, probabilities = onnxruntime.InferenceSession(head).run(
        ["logits", "probabilities"], {"feature": np.concatenate(features, axis=1)}
    )
    given = fused.run(None, images)
    for ours, theirs in zip(given, (probabilities, logits), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_backbones_that_cannot_be_merged_are_an_error() -> None:
    """They have operators of another domain than ONNX's own, in two versions."""
    files = []
    for version in (1, 2):
        model = onnx.load_model_from_string(tiny_backbone(feature_size=FEATURE_SIZE // 2))
        model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", version))
        files.append(bytes(model.SerializeToString()))
    head = head_to_onnx(network(), metadata=described(*files))
    with pytest.raises(
        BackboneMismatch, match=r"onnx cannot merge the backbones and the head: .*different operator set"
    ):
        fuse(files, head)


def test_head_of_another_backbone_is_not_fused(head: bytes, backbone: bytes) -> None:
    """The error has both digests."""
    other = tiny_backbone(feature_size=FEATURE_SIZE, seed=1)
    with pytest.raises(BackboneMismatch) as caught:
        fuse([other], head)
    for file in (backbone, other):
        assert hashlib.sha256(file).hexdigest() in str(caught.value)


def test_two_heads_are_not_fused(head: bytes) -> None:
    """The error names a backbone as expected."""
    with pytest.raises(BackboneMismatch, match="expected a protofleet backbone"):
        fuse([head], head)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_compressed_head_is_exported(scale: float) -> None:
    """Its float16 weights are converted when the graph runs: ONNX Runtime computes what NumPy does."""
    features = random_features(50) * np.float32(scale)
    layers = compress(network(), features)
    file = head_to_onnx(layers, metadata=described(b"1"))
    assert max_difference(layers, file, features) < 1e-5


def test_head_of_1280_features_and_10_classes_is_small() -> None:
    """At most a tenth of mobilenetv2_100's 8.9 MB."""
    classifier = Dense(np.zeros((10, 512), dtype=np.float32), np.zeros(10, dtype=np.float32))
    adapter = [
        Dense(np.ones((outputs, inputs), dtype=np.float32), np.zeros(outputs, dtype=np.float32))
        for inputs, outputs in ((1280, 1024), (1024, 512))
    ]
    features = np.random.default_rng(0).normal(size=(20, 1280)).astype(np.float32)
    metadata = msgspec.structs.replace(described(b"1"), feature_size=1280, classes=tuple("0123456789"))
    file = head_to_onnx(compress([*adapter, classifier], features), metadata=metadata)
    assert len(file) < 890_000


CONFIDENCE = ConfidenceMap(np.array([-1, 2, 5, 9], np.float32), np.array([-1.5, 0.5, 0.5, 3], np.float32))


def test_file_computes_the_calibration(head: bytes) -> None:
    """With the weights of the head before; its metadata name the version, and the figures of both."""
    file = with_calibration(head, CONFIDENCE, version=5, figures={"calibrated_from": 4.0})
    features = random_features(400)
    before, _ = logits_and_probabilities(head, features)
    logits, probabilities = logits_and_probabilities(file, features)
    np.testing.assert_allclose(logits, calibrated(before, CONFIDENCE), atol=1e-5)
    np.testing.assert_allclose(probabilities, softmax(logits), atol=1e-6)
    assert not np.allclose(logits, before, atol=0.1)
    assert calibrated_head.max_difference(head, file, CONFIDENCE, features) < 1e-5
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
    assert calibrated_head.max_difference(head, file, other, random_features(50)) > 1e-3
    stranger = head_to_onnx(network(seed=1), metadata=described(b""))
    assert calibrated_head.max_difference(stranger, file, CONFIDENCE, random_features(50)) == float("inf")


def test_head_is_calibrated_once(head: bytes, backbone: bytes) -> None:
    """One with a single class never."""
    alone = msgspec.structs.replace(described(backbone), classes=("ant",))
    layer = Dense(np.ones((1, FEATURE_SIZE), np.float32), np.zeros(1, np.float32))
    again = with_calibration(head, CONFIDENCE, version=5, figures={})
    for file in (again, head_to_onnx([layer], metadata=alone)):
        with pytest.raises(ProtofleetError, match="several classes that is not calibrated"):
            with_calibration(file, CONFIDENCE, version=6, figures={})


TAKES_LOGITS = head_metadata(b"a backbone", classes=CLASSES, feature_size=len(CLASSES))
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
