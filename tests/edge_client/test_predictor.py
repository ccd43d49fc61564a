"""Heads on the device: which are taken into use, and what they say."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_client.backbone import Backbone
from edge_client.images import decode
from edge_client.predictor import evaluate, open_head, predict
from protocol.errors import BackboneMismatch
from protocol.preprocessing import preprocess
from tests.edge_client.made import CLASSES, choosy, linear_head, tiny, write_pictures


def _weights(backbone: Backbone, pictures: list[Path]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Weights that tell the first picture's class from the last one's."""
    spec = backbone.metadata.preprocessing
    features = backbone.features(np.stack([preprocess(decode(p), spec) for p in pictures]))
    middle = features.mean(axis=0)
    direction = features[-1] - features[0]
    scaled = 20 * direction / np.abs(features @ direction - middle @ direction).max()
    offset = middle @ scaled / (middle @ middle)
    return np.stack([np.zeros_like(scaled), scaled - offset * middle], axis=1).astype(np.float32)


def test_prediction_names_the_class(tmp_path: Path) -> None:
    """A head that separates two classes names them, the likeliest first, with probabilities that add up to 1."""
    data = write_pictures(tmp_path / "data", count=3)
    backbone = tiny(tmp_path)
    pictures = [data / "cat" / "0000.png", data / "dog" / "0000.png"]
    head = open_head(linear_head(backbone, _weights(backbone, pictures)), backbone=backbone, classes=CLASSES)
    cat, dog = predict(pictures, backbone, head, top=2)
    assert (cat.label, dog.label) == ("cat", "dog")
    assert sum(score for _, score in cat.top) == pytest.approx(1, abs=1e-5)
    assert cat.top[0][1] > cat.top[1][1]


def test_an_unreadable_picture_does_not_end_the_rest(tmp_path: Path) -> None:
    """What cannot be read is told, and the next picture is predicted."""
    data = write_pictures(tmp_path / "data", count=1)
    backbone = tiny(tmp_path)
    head = open_head(linear_head(backbone, np.zeros((16, 2), dtype=np.float32)), backbone=backbone)
    missing, there = predict([tmp_path / "none.png", data / "cat" / "0000.png"], backbone, head, top=5)
    assert "none.png" in missing.error
    assert not there.error
    assert len(there.top) == len(CLASSES)


def test_predictions_come_in_order_whatever_is_among_them(tmp_path: Path) -> None:
    """Broken pictures and those with NaN features take their places in the row, over any cut into batches."""
    data = write_pictures(tmp_path / "data", count=4)
    Image.new("RGB", (12, 10), "white").save(tmp_path / "white.png")
    (tmp_path / "junk.png").write_text("junk")
    backbone = choosy(tmp_path)
    head = open_head(linear_head(backbone, np.zeros((16, 2), dtype=np.float32)), backbone=backbone)
    cats = sorted((data / "cat").iterdir())
    paths = [cats[0], tmp_path / "white.png", cats[1], tmp_path / "junk.png", cats[2], cats[3]]
    for batch_size in (1, 3, 10):
        predictions = list(predict(paths, backbone, head, top=1, batch_size=batch_size))
        assert [prediction.path for prediction in predictions] == paths
        assert [bool(prediction.error) for prediction in predictions] == [
            False,
            True,
            False,
            True,
            False,
            False,
        ]
        assert "white.png: the backbone gives NaN" in predictions[1].error


def test_evaluation_counts(tmp_path: Path) -> None:
    """Right answers are counted over all chunks."""
    backbone = tiny(tmp_path)
    weights = np.zeros((16, 2), dtype=np.float32)
    weights[0, 1] = 1
    head = open_head(linear_head(backbone, weights), backbone=backbone)
    positive, negative = np.ones((3, 16), dtype=np.float32), -np.ones((2, 16), dtype=np.float32)
    assert evaluate(head, [positive, negative], label=1) == 3
    assert evaluate(head, [positive, negative], label=0) == 2
    assert evaluate(head, [], label=0) == 0


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Another backbone's head (with both digests), other classes, NaN, no probabilities, no ONNX: refused."""
    backbone, other = tiny(tmp_path), tiny(tmp_path, seed=1)
    good = np.zeros((16, 2), dtype=np.float32)
    with pytest.raises(BackboneMismatch, match=f"{other.sha256}.*{backbone.sha256}"):
        open_head(linear_head(other, good), backbone=backbone)
    with pytest.raises(BackboneMismatch, match="classes"):
        open_head(linear_head(backbone, good), backbone=backbone, classes=("cat", "cow"))
    with pytest.raises(BackboneMismatch, match="add up"):
        open_head(linear_head(backbone, good, softmax=False), backbone=backbone)
    with pytest.raises(BackboneMismatch, match="add up"):
        open_head(linear_head(backbone, np.full((16, 2), np.nan, dtype=np.float32)), backbone=backbone)
    with pytest.raises(BackboneMismatch, match="cannot load"):
        open_head(b"junk", backbone=backbone)
    wide = tiny(tmp_path, seed=2, feature_size=8)
    with pytest.raises(BackboneMismatch, match="features"):
        open_head(linear_head(wide, good[:8], backbone_sha256=backbone.sha256), backbone=backbone)
