"""Drift: images that differ from the labeled ones."""

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.apps import drift
from edge_client.apps.drift import DriftMonitor, drift_score
from edge_client.apps.head_in_use import HeadInUse
from edge_client.images.decoding import decode
from edge_client.images.extraction import ISOLATED, Refusal, feature_of
from edge_client.store.app_files import DRIFT_AGE_S, Drift, read_value, write_value
from protocol.wire.messages import DRIFT_LIMIT, DeviceInfo
from tests.support.devices.device_bench import CONSTANT, HeadBench
from tests.support.devices.device_factory import noise

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


def _wait_for_comparison() -> None:
    for thread in threading.enumerate():
        if thread.name == "drift":
            thread.join(60)


@pytest.mark.parametrize("tag", ["", ISOLATED])
def test_programs_that_predict_store_the_score_and_the_device_reports_it(
    bench: HeadBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tag: str
) -> None:
    """One image in INTERVAL_S counts; under differential privacy the labeled features are isolated ones."""
    monkeypatch.setattr(drift, "WINDOW", 3)
    bench.install(bench.head(1, CONSTANT["cat"]))
    with closing(sqlite3.connect(bench.store.folder / "features.sqlite")) as cache, cache:
        cache.execute("UPDATE features SET backbone = backbone || ?", [tag])
    using = HeadInUse(bench.store, provider="cpu", threads=1).follow()
    using.run(noise())
    using.run(noise())
    assert read_value(bench.store.folder, Drift) == Drift()
    monkeypatch.setattr(drift, "INTERVAL_S", 0.0)
    monitor = DriftMonitor(bench.store.folder, using.head, (using.backbones[0].sha256,))
    feature = feature_of(decode(bench.settings.data / "cat" / "0000.png"), using.backbones)
    assert not isinstance(feature, Refusal)
    for _ in range(3):
        monitor.observe(5 * feature)
    _wait_for_comparison()
    found = read_value(bench.store.folder, Drift)
    assert (found.images, found.score > DRIFT_LIMIT) == (3, True)
    assert abs(found.tested_s - time.time()) < 60
    assert "images differ from the labeled ones" in caplog.text
    bench.scan()
    assert bench.info.drift == found.score
    write_value(bench.store.folder, Drift(score=found.score, images=3, tested_s=time.time() - DRIFT_AGE_S))
    bench.scan()
    assert not isinstance(bench.info.drift, float)


@pytest.mark.parametrize("max_epsilon", [None, 1.0])
def test_a_private_device_does_not_tell_that_the_drift_has_changed(
    tmp_path: Path, max_epsilon: float | None
) -> None:
    """Its info has no drift, and is not sent again: when would tell of the images that are predicted."""
    bench = HeadBench(tmp_path, max_epsilon=max_epsilon)
    bench.install(bench.head(1, CONSTANT["cat"]))
    before = len(bench.sent("info", DeviceInfo))
    for score in (1.0, 2.0):
        write_value(bench.store.folder, Drift(score=score, images=3, tested_s=time.time()))
        bench.scan()
    assert len(bench.sent("info", DeviceInfo)) - before == (2 if max_epsilon is None else 0)


def test_missing_features_are_reported_once(
    bench: HeadBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.install(bench.head(1, CONSTANT["cat"]))
    using = HeadInUse(bench.store, provider="cpu", threads=1).follow()
    monkeypatch.setattr(drift, "WINDOW", 1)
    monkeypatch.setattr(drift, "INTERVAL_S", 0.0)
    monitor = DriftMonitor(bench.store.folder, using.head, ("0" * 64,))
    for _ in range(3):
        monitor.observe(np.zeros(16, np.float32))
        _wait_for_comparison()
    assert caplog.text.count("drift not tested") == 1


def test_no_prediction_waits_for_a_comparison(bench: HeadBench, monkeypatch: pytest.MonkeyPatch) -> None:
    is_observed = threading.Event()
    bench.install(bench.head(1, CONSTANT["cat"]))
    using = HeadInUse(bench.store, provider="cpu", threads=1).follow()
    monkeypatch.setattr(drift, "WINDOW", 1)
    monkeypatch.setattr(drift, "drift_score", lambda *_: 2.0 if is_observed.wait(60) else None)
    monitor = DriftMonitor(bench.store.folder, using.head, tuple(each.sha256 for each in using.backbones))
    monitor.observe(np.zeros(16, np.float32))
    is_observed.set()
    _wait_for_comparison()
    assert read_value(bench.store.folder, Drift).score == 2.0
