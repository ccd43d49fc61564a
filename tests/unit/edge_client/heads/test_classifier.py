"""Heads opened and evaluated; answers to images."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image

from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.novelty import class_directions
from aggregator.graphs.head_export import head_to_onnx
from edge_client.cli.predict import printer
from edge_client.graphs import onnx_model
from edge_client.heads.class_prior import Adjuster
from edge_client.heads.classifier import Classifier, Prediction
from edge_client.heads.head import Head, Result, open_head, open_round_head
from edge_client.heads.head_evaluation import evaluate
from edge_client.images.decoding import decode
from edge_client.images.extraction import Refusal
from edge_client.store.stored_values import InstalledHead
from edge_client.training.local_round import LocalModel
from protocol.errors import BackboneMismatch, GraphRefused
from protocol.models.onnx_metadata import HeadMetadata
from protocol.models.preprocessing import preprocess
from tests.support.devices.device_factory import (
    CLASSES,
    choosy,
    classifier,
    linear_head,
    tiny,
    write_images,
)
from tests.support.graphs import step_graphs
from tests.support.graphs.backbones import changed
from tests.support.graphs.hostile_graphs import infinite_loop


def answers(of: Classifier, paths: list[Path], *, top: int) -> list[Prediction]:
    """Return the predictions for the usable images."""
    return [each for _, each in of.predict(paths, top=top) if isinstance(each, Prediction)]


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
    good, both = np.zeros((16, 2), dtype=np.float32), [backbone, other]
    wide = tiny(tmp_path, seed=2, feature_size=8)
    nan = np.full((16, 2), np.nan, dtype=np.float32)
    swapped = linear_head([other, backbone], np.zeros((32, 2), np.float32))
    for file, error, reason in (
        (linear_head([other], good), BackboneMismatch, f"{other.sha256}.*{backbone.sha256}"),
        (swapped, BackboneMismatch, f"{backbone.sha256}, {other.sha256}"),
        (linear_head([backbone], good, classes=("cat", "cow")), BackboneMismatch, "classes"),
        (linear_head([backbone], good, softmax=False), GraphRefused, "add up"),
        (linear_head([backbone], nan), GraphRefused, "add up"),
        (b"junk", GraphRefused, "expected an ONNX file"),
        (linear_head([wide], good[:8], sha256s=(backbone.sha256,)), BackboneMismatch, "features"),
    ):
        with pytest.raises(error, match=reason):
            open_head(file, backbones=both if file is swapped else [backbone], classes=CLASSES)


def test_a_graph_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny(tmp_path)
    endless = changed(linear_head([backbone], np.zeros((16, 2), dtype=np.float32)), infinite_loop)
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
    more = """h (float[n, 4] feature, float[4, 3] weight, uint8[k] present) => (float[n, 3] probabilities)
        { logits = MatMul(feature, weight) probabilities = Softmax(logits) }"""
    broken = """h (float[n, 4] feature, float[4, 2] weight) => (float[n, k] probabilities)
        { probabilities = Concat<axis = 1>(feature, weight) }"""
    state: dict[str, Any] = {"weight": np.zeros((4, 3), np.float32), "present": np.ones(9, np.uint8)}
    nan = {"weight": np.full((4, 2), np.nan, np.float32)}
    two = replace(LOCAL_MODEL, counts=np.zeros(2, np.float32))
    present = {"local_model": replace(LOCAL_MODEL, state=state), "tensors": {}}
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {"local_model": replace(LOCAL_MODEL, state={})},
            "the head graph asks for weight; there are targets",
        ),
        ({"local_model": two}, r"'local_counts' must be float32 \(3\), and is float32 \(2\)"),
        ({"feature_size": 5, "classes": ("a", "b")}, "for 5 features and 2 classes, got one for 4 and 3"),
        ({"file": step_graphs.file("step")}, "expected the graph for head, got the one for step"),
        ({"local_model": replace(LOCAL_MODEL, state=nan)}, "one probability per class"),
        (
            {"file": step_graphs.file("head", body=more), **present},
            r"'present' must be uint8 \(3\), and is uint8 \(9\)",
        ),
        ({"file": step_graphs.file("head", body=broken)}, "the head graph fails"),
    ]
    for changes, reason in refused:
        with pytest.raises(GraphRefused, match=reason):
            round_head(**changes)


def _head_file(folder: Path, known: Path, *, threshold: float | None) -> bytes:
    """Write a head that finds both classes equally probable, and whose one class mean is that image's feature."""
    backbone = tiny(folder)
    spec = backbone.metadata.preprocessing
    means = backbone.features(preprocess(decode(known), spec)[None])
    size = backbone.metadata.feature_size
    layer = Dense(np.zeros((2, size), np.float32), np.array([0.2, 0], np.float32))
    metadata = HeadMetadata(
        classes=CLASSES,
        version=1,
        task="0" * 64,
        backbones=(backbone.sha256,),
        feature_size=size,
        training={},
        novelty_threshold=threshold,
    )
    return head_to_onnx([layer], metadata=metadata, directions=class_directions(means))


def _classifier(
    folder: Path,
    known: Path,
    *,
    threshold: float | None = 1e-5,
    min_probability: float = 0.0,
    prior: Any = "none",
) -> Classifier:
    head = open_head(_head_file(folder, known, threshold=threshold), backbones=[tiny(folder)])
    installed = InstalledHead(head=b"", version=1, backbones=(), classes=head.classes)
    adjuster = Adjuster(head.classes, prior, labels={})
    return Classifier(installed, [tiny(folder)], head, adjuster, min_probability)


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """An image of a known class, and another one."""
    data = write_images(tmp_path / "data", count=1)
    return [data / "cat" / "0000.png", data / "dog" / "0000.png"]


@pytest.mark.parametrize(
    ("threshold", "min_probability", "answers", "known"),
    [
        (1e-5, 0.0, ["cat", "unrecognized"], [True, False]),
        (1e-5, 0.6, ["unsure", "unrecognized"], [True, False]),
        (2.0, 0.6, ["unsure", "unsure"], [True, True]),
        (2.0, 0.5, ["cat", "cat"], [True, True]),
        (None, 0.0, ["cat", "cat"], [None, None]),
    ],
)
def test_answer_is_unrecognized_above_the_threshold_and_unsure_below_the_minimum(
    tmp_path: Path, images: list[Path], threshold: float | None, min_probability: float, answers: list[str],
    known: list[bool | None],
) -> None:  # fmt: skip
    """The label stays the most probable class; images one by one have the same answers."""
    using = _classifier(tmp_path, images[0], threshold=threshold, min_probability=min_probability)
    found = [each for _, each in using.predict(images, top=2)]
    assert found == [using.classify(path.read_bytes(), top=2) for path in images]
    for each, answer, is_known in zip(found, answers, known, strict=True):
        assert isinstance(each, Prediction)
        fields = each.fields()
        assert (each.label, fields["answer"], fields["known"]) == ("cat", answer, is_known)


def test_images_of_no_known_class_are_not_in_the_prior(tmp_path: Path, images: list[Path]) -> None:
    """Their own probabilities are not adjusted."""
    using = _classifier(tmp_path, images[0], prior="images")
    using = replace(using, head=_leaning(using.head))
    found = [each for _, each in using.predict([*images] * 30, top=2, at_once=60)]
    known, unknown = found[0], found[1]
    assert isinstance(known, Prediction)
    assert isinstance(unknown, Prediction)
    assert (known.prior.source, unknown.prior.source) == ("images", "none")
    assert known.top[0][1] > unknown.top[0][1]


def _leaning(head: Head) -> Head:
    """Return the head with known images as cats, and unknown ones as dogs."""

    class Leaning(Head):
        def run(self, features: Any) -> Result:
            found = super().run(features)
            rows = np.where(found.novelty[:, None] > 1e-5, [[0.1, 0.9]], [[0.8, 0.2]])  # type: ignore[index]
            return Result(rows.astype(np.float32), found.novelty)

    return Leaning(head.classes, head.model, head.bound, novelty_threshold=head.novelty_threshold)


def test_programs_print_the_answer(
    tmp_path: Path, images: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """As text, JSON and CSV."""
    using = _classifier(tmp_path, images[0])
    printed = []
    for options in ({}, {"as_json": True}, {"as_csv": True}):
        output = printer(**{"as_json": False, "as_csv": False, **options})
        for path, prediction in using.predict(images, top=2):
            output(path, prediction, using.installed)
        printed.append(capsys.readouterr().out.splitlines())
    text, as_json, as_csv = printed
    scores = "cat 55.0%  dog 45.0%"
    assert text == [f"{images[0]}: {scores}", f"{images[1]}: unrecognized ({scores})"]
    assert [json.loads(line)["answer"] for line in as_json] == ["cat", "unrecognized"]
    assert [row["answer"] for row in csv.DictReader(as_csv)] == ["cat", "unrecognized"]


def test_head_whose_novelty_is_not_finite_is_refused(tmp_path: Path, images: list[Path]) -> None:
    def spoil(model: onnx.ModelProto) -> None:
        (whole,) = (each for each in model.graph.initializer if each.name == "novelty_whole")
        whole.CopyFrom(numpy_helper.from_array(np.array(np.nan, np.float32), "novelty_whole"))

    file = changed(_head_file(tmp_path, images[0], threshold=1e-5), spoil)
    with pytest.raises(GraphRefused, match="does not give a finite novelty"):
        open_head(file, backbones=[tiny(tmp_path)])
