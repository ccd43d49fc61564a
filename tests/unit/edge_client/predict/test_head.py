"""Heads on the device: opened, refused, evaluated, and used to predict."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edge_client.data.extraction import Refusal
from edge_client.data.images import decode
from edge_client.predict.classifier import Classifier, Prediction
from edge_client.predict.head import Head, open_head, open_round_head
from edge_client.runtime import onnx_model, watchdog
from edge_client.runtime.backbone import Backbone
from edge_client.submission.head_evaluation import evaluate
from edge_client.training.local_round import LocalModel
from protocol.errors import BackboneMismatch, GraphRefused
from protocol.models.preprocessing import preprocess
from tests.support.devices.device_factory import CLASSES, choosy, classifier, linear_head, tiny, write_images
from tests.support.graphs import step_graphs
from tests.support.graphs.backbones import changed
from tests.support.graphs.hostile_graphs import infinite_loop


def _weights(backbone: Backbone, images: list[Path]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return weights that separate the first image's class from the last one's."""
    spec = backbone.metadata.preprocessing
    features = backbone.features(np.stack([preprocess(decode(p), spec) for p in images]))
    middle = features.mean(axis=0)
    direction = features[-1] - features[0]
    scaled = 20 * direction / np.abs(features @ direction - middle @ direction).max()
    offset = middle @ scaled / (middle @ middle)
    return np.stack([np.zeros_like(scaled), scaled - offset * middle], axis=1).astype(np.float32)


def answers(of: Classifier, paths: list[Path], *, top: int) -> list[Prediction]:
    """Return the predictions for the usable images."""
    return [each for _, each in of.predict(paths, top=top) if isinstance(each, Prediction)]


def test_a_head_without_a_probability_is_refused(tmp_path: Path) -> None:
    """It gives NaN for one image, and probabilities where it is tested: `predict` prints no class for NaN."""
    weights = np.tile(np.array([9, -9], np.float32), (16, 1))
    head = open_head(linear_head([tiny(tmp_path)], weights), backbones=[tiny(tmp_path)])
    with pytest.raises(GraphRefused, match="NaN or infinity"):
        head.probabilities(np.full((1, 16), 3e38, np.float32))


def test_predictions_keep_the_order_of_images(tmp_path: Path) -> None:
    """Missing and broken images and those with NaN features keep their places, for any batch size."""
    data = write_images(tmp_path / "data", count=4)
    Image.new("RGB", (12, 10), "white").save(tmp_path / "white.png")
    (tmp_path / "junk.png").write_text("junk")
    backbone = choosy(tmp_path)
    head = open_head(linear_head([backbone], np.zeros((16, 2), dtype=np.float32)), backbones=[backbone])
    cats = sorted((data / "cat").iterdir())
    broken = [tmp_path / name for name in ("white.png", "junk.png", "none.png")]
    paths = [cats[0], broken[0], cats[1], *broken[1:], cats[2], cats[3]]
    for batch_size in (1, 3, 10):
        found = list(classifier([backbone], head).predict(paths, top=5, batch_size=batch_size))
        assert [path for path, _ in found] == paths
        reasons = [each.reason if isinstance(each, Refusal) else "" for _, each in found]
        assert [bool(reason) for reason in reasons] == [path in broken for path in paths]
        assert "the backbone gives NaN" in reasons[1]
        assert "No such file" in reasons[4]
        assert isinstance(found[0][1], Prediction)
        assert len(found[0][1].top) == len(CLASSES)


def test_unsuitable_head_is_refused(tmp_path: Path) -> None:
    """Another backbone's head (with both digests), other classes, NaN, no probabilities, no ONNX."""
    backbone, other = tiny(tmp_path), tiny(tmp_path, seed=1)
    good = np.zeros((16, 2), dtype=np.float32)
    with pytest.raises(BackboneMismatch, match=f"{other.sha256}.*{backbone.sha256}"):
        open_head(linear_head([other], good), backbones=[backbone])
    with pytest.raises(BackboneMismatch, match=f"{backbone.sha256}, {other.sha256}"):
        open_head(linear_head([other, backbone], np.zeros((32, 2), np.float32)), backbones=[backbone, other])
    with pytest.raises(BackboneMismatch, match="classes"):
        open_head(linear_head([backbone], good), backbones=[backbone], classes=("cat", "cow"))
    with pytest.raises(GraphRefused, match="add up"):
        open_head(linear_head([backbone], good, softmax=False), backbones=[backbone])
    with pytest.raises(GraphRefused, match="add up"):
        open_head(linear_head([backbone], np.full((16, 2), np.nan, dtype=np.float32)), backbones=[backbone])
    with pytest.raises(GraphRefused, match="expected an ONNX file"):
        open_head(b"junk", backbones=[backbone])
    wide = tiny(tmp_path, seed=2, feature_size=8)
    with pytest.raises(BackboneMismatch, match="features"):
        open_head(linear_head([wide], good[:8], sha256s=(backbone.sha256,)), backbones=[backbone])


def test_infinite_loop_in_a_head_exceeds_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A good head runs after it."""
    backbone = tiny(tmp_path)
    good = linear_head([backbone], np.zeros((16, 2), dtype=np.float32))
    monkeypatch.setattr(onnx_model, "MAX_RUN_S", 0.5)
    with pytest.raises(GraphRefused, match="exceeded the time limit"):
        open_head(changed(good, infinite_loop), backbones=[backbone])
    assert open_head(good, backbones=[backbone]).probabilities(np.zeros((1, 16), np.float32)).shape == (1, 2)


def test_a_cancelled_job_runs_no_graph_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that runs is ended, and later ones of the job too."""
    backbone = tiny(tmp_path)
    endless = changed(linear_head([backbone], np.zeros((16, 2), dtype=np.float32)), infinite_loop)
    cancelled = threading.Event()
    later = threading.Timer(0.3, cancelled.set)
    later.start()
    with watchdog.cancelled_by(cancelled):
        for _ in range(2):
            with pytest.raises(GraphRefused, match="the time limit"):
                open_head(endless, backbones=[backbone])
    later.join()
    monkeypatch.setattr(onnx_model, "MAX_RUN_S", 0.5)
    with pytest.raises(GraphRefused, match="exceeded the time limit of 0 s"):
        open_head(endless, backbones=[backbone])


def test_features_of_several_backbones_are_concatenated_in_order(tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", count=2)
    Image.new("RGB", (12, 10), "white").save(tmp_path / "white.png")
    backbones = [tiny(tmp_path, feature_size=5), choosy(tmp_path), tiny(tmp_path, seed=1, feature_size=3)]
    weights = np.random.default_rng(0).normal(size=(5 + 16 + 3, 2)).astype(np.float32)
    head = open_head(linear_head(backbones, weights), backbones=backbones, classes=CLASSES)
    paths = [data / "cat" / "0000.png", tmp_path / "white.png", data / "dog" / "0001.png"]
    cat, dog = answers(classifier(backbones, head), paths, top=2)
    for path, prediction in ((paths[0], cat), (paths[2], dog)):
        pixels = preprocess(decode(path), backbones[0].metadata.preprocessing)[None]
        logits = np.concatenate([backbone.features(pixels) for backbone in backbones], axis=1) @ weights
        assert dict(prediction.top)["dog"] == pytest.approx(
            1 / (1 + np.exp(logits[0, 0] - logits[0, 1])), rel=1e-4
        )


LOCAL_MODEL = LocalModel(
    state={"weight": np.eye(4, 2, dtype=np.float32)},
    prototypes=np.array([[0, 0], [0, 0], [5, 5]], dtype=np.float32),
    counts=np.array([0, 0, 2], dtype=np.float32),
)
"""Of a device that has images of the last class only."""


def round_head(**replaced: Any) -> Head:
    return open_round_head(
        **{
            "file": step_graphs.file("head"),
            "local_model": LOCAL_MODEL,
            "tensors": step_graphs.round_tensors(),
            "feature_size": 4,
            "classes": ("a", "b", "c"),
            **replaced,
        }
    )


def test_round_head_is_bound_to_state_tensors_and_local_prototypes() -> None:
    head = round_head()
    features = np.array([[1, 0, 9, 9], [0, 1, 9, 9], [1, 1, 9, 9]], dtype=np.float32)
    logits = features[:, :2] @ np.array([[1, 0], [0, 1], [5, 5]]).T
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(head.probabilities(features), expected, rtol=1e-5)
    assert head.is_personal
    assert evaluate(head, [features, features[:1]], label=2)[2] == 4
    strange = round_head(local_model=replace(LOCAL_MODEL, counts=np.zeros(3, np.float32)))
    assert evaluate(strange, [features], label=0)[0] == 2


def test_classes_without_prototypes_are_unknown() -> None:
    """The round's tensor `present` names those that have some; without it all are known."""
    head = round_head()
    assert head.known_classes == [0, 1, 2]
    assert replace(head, bound={**head.bound, "present": np.array([0, 1, 1], np.uint8)}).known_classes == [
        1,
        2,
    ]


def test_round_head_with_unsuitable_tensors_is_refused() -> None:
    """A missing tensor, another shape, size or role, and NaN: the error names each."""
    with pytest.raises(GraphRefused, match="the head graph asks for weight; there are targets"):
        round_head(local_model=replace(LOCAL_MODEL, state={}))
    with pytest.raises(GraphRefused, match=r"'local_counts' must be float32 \(3\), and is float32 \(2\)"):
        round_head(local_model=replace(LOCAL_MODEL, counts=np.zeros(2, np.float32)))
    with pytest.raises(GraphRefused, match="for 5 features and 2 classes, got one for 4 and 3"):
        round_head(feature_size=5, classes=("a", "b"))
    with pytest.raises(GraphRefused, match="expected the graph for head, got the one for step"):
        round_head(file=step_graphs.file("step"))
    with pytest.raises(GraphRefused, match="one probability per class"):
        round_head(local_model=replace(LOCAL_MODEL, state={"weight": np.full((4, 2), np.nan, np.float32)}))
    more = """h (float[n, 4] feature, float[4, 3] weight, uint8[k] present) => (float[n, 3] probabilities)
        { logits = MatMul(feature, weight) probabilities = Softmax(logits) }"""
    state: dict[str, Any] = {"weight": np.zeros((4, 3), np.float32), "present": np.ones(9, np.uint8)}
    with pytest.raises(GraphRefused, match=r"'present' must be uint8 \(3\), and is uint8 \(9\)"):
        round_head(
            file=step_graphs.file("head", body=more),
            local_model=replace(LOCAL_MODEL, state=state),
            tensors={},
        )
    broken = """h (float[n, 4] feature, float[4, 2] weight) => (float[n, k] probabilities)
        { probabilities = Concat<axis = 1>(feature, weight) }"""
    with pytest.raises(GraphRefused, match="the head graph fails"):
        round_head(file=step_graphs.file("head", body=broken))
