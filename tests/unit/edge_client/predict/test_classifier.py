"""Answers to images: a class, `unsure`, or `unknown`; drift, where images differ from the labeled ones."""

import csv
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.novelty import class_directions
from aggregator.graphs.head_export import head_to_onnx
from edge_client.cli.predict import printer
from edge_client.cli.watch import changes_only
from edge_client.data.class_prior import Adjuster
from edge_client.data.extraction import Refusal, feature_of
from edge_client.data.images import decode
from edge_client.predict import drift
from edge_client.predict.classifier import Classifier, Prediction
from edge_client.predict.drift import DriftMonitor, drift_score
from edge_client.predict.head import Head, Result, open_head
from edge_client.predict.head_in_use import HeadInUse
from edge_client.predict.majority import Majority
from edge_client.storage.stored_values import DRIFT_AGE_S, Drift, InstalledHead
from protocol.errors import GraphRefused
from protocol.models.onnx_metadata import HeadMetadata
from protocol.models.preprocessing import preprocess
from protocol.wire.messages import DRIFT_LIMIT
from tests.support.devices.device_bench import CONSTANT, HeadBench
from tests.support.devices.device_factory import CLASSES, noise, tiny, write_images
from tests.support.graphs.backbones import changed


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
        (1e-5, 0.0, ["cat", "unknown"], [True, False]),
        (1e-5, 0.6, ["unsure", "unknown"], [True, False]),
        (2.0, 0.6, ["unsure", "unsure"], [True, True]),
        (2.0, 0.5, ["cat", "cat"], [True, True]),
        (None, 0.0, ["cat", "cat"], [None, None]),
    ],
)
def test_answer_is_unknown_above_the_threshold_and_unsure_below_the_minimum(
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
    assert text == [f"{images[0]}: {scores}", f"{images[1]}: unknown ({scores})"]
    assert [json.loads(line)["answer"] for line in as_json] == ["cat", "unknown"]
    assert [row["answer"] for row in csv.DictReader(as_csv)] == ["cat", "unknown"]


def test_watch_prints_changes_only(
    tmp_path: Path, images: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """An image that cannot be read changes nothing, and is an error."""
    using = _classifier(tmp_path, images[0])
    output = changes_only(printer(as_json=True, as_csv=False), Majority(frames=3, agree=0.6, debounce_s=0.0))
    known, unknown = images
    paths = [known, known, tmp_path / "none.png", known, unknown, known, unknown, unknown]
    for path, prediction in using.predict(paths, top=2):
        output(path, prediction, using.installed)
    printed = capsys.readouterr()
    assert [json.loads(line)["answer"] for line in printed.out.splitlines()] == ["cat", "unknown"]
    assert "none.png" in printed.err


def test_head_whose_novelty_is_not_finite_is_refused(tmp_path: Path, images: list[Path]) -> None:
    def spoil(model: onnx.ModelProto) -> None:
        (whole,) = (each for each in model.graph.initializer if each.name == "novelty_whole")
        whole.CopyFrom(numpy_helper.from_array(np.array(np.nan, np.float32), "novelty_whole"))

    file = changed(_head_file(tmp_path, images[0], threshold=1e-5), spoil)
    with pytest.raises(GraphRefused, match="does not give a finite novelty"):
        open_head(file, backbones=[tiny(tmp_path)])


SIZE = 64


def _images(count: int, classes: list[int], seed: int, shift: float = 0.0) -> tuple[Any, Any]:
    """Return features of three distant classes, the third with twice the spread, and the classes."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(classes, count)
    means = np.random.default_rng(0).normal(size=(3, SIZE)) * 5
    spread = np.where(labels == 2, 2.0, 1.0)[:, None]
    return (means[labels] + spread * rng.normal(size=(count, SIZE)) + shift).astype(np.float32), labels


def _score(window: tuple[Any, Any], seed: int = 1) -> float:
    score = drift_score(*_images(200, [0, 1, 2], seed), *window)
    assert score is not None
    return score


@pytest.mark.parametrize("classes", [[0, 1, 2], [0], [2], [1, 2]])
def test_another_mixture_of_classes_is_no_drift(classes: list[int]) -> None:
    """Not in one of 20 windows, also of the class that is spread most."""
    scores = [_score(_images(100, classes, seed + 100), seed) for seed in range(20)]
    assert max(scores) < DRIFT_LIMIT


@pytest.mark.parametrize("classes", [[0, 1, 2], [2]])
def test_shifted_images_are_drift(classes: list[int]) -> None:
    scores = [_score(_images(100, classes, seed + 100, shift=1.0), seed) for seed in range(10)]
    assert min(scores) > DRIFT_LIMIT


def test_programs_that_predict_store_the_score_and_the_device_reports_it(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One image in INTERVAL_S counts."""
    monkeypatch.setattr(drift, "WINDOW", 3)
    bench.install(bench.head(1, CONSTANT["cat"]))
    using = HeadInUse(bench.store, provider="cpu", threads=1).follow()
    using.run(noise())
    using.run(noise())
    assert bench.store.get(Drift) == Drift()
    monkeypatch.setattr(drift, "INTERVAL_S", 0.0)
    monitor = DriftMonitor(bench.store, using.head, (using.backbones[0].sha256,))
    feature = feature_of(decode(bench.settings.data / "cat" / "0000.png"), using.backbones)
    assert not isinstance(feature, Refusal)
    for _ in range(3):
        monitor.observe(5 * feature)
    found = bench.store.get(Drift)
    assert (found.images, found.score > DRIFT_LIMIT) == (3, True)
    assert abs(found.tested_s - time.time()) < 60
    assert "images differ from the labeled ones" in caplog.text
    bench.scan()
    assert bench.info.drift == found.score
    bench.store.set(Drift(score=found.score, images=3, tested_s=time.time() - DRIFT_AGE_S))
    bench.scan()
    assert not isinstance(bench.info.drift, float)


def test_missing_features_are_reported(
    bench: HeadBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.install(bench.head(1, CONSTANT["cat"]))
    using = HeadInUse(bench.store, provider="cpu", threads=1).follow()
    monkeypatch.setattr(drift, "WINDOW", 1)
    DriftMonitor(bench.store, using.head, ("0" * 64,)).observe(np.zeros(16, np.float32))
    assert "drift not tested" in caplog.text
