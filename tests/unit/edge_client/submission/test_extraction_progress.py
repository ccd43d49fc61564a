"""Progress of feature extraction: in the log, on a terminal, and stored for `status`."""

import io
import logging
from pathlib import Path

import pytest

from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import ExtractionProgress
from edge_client.submission.extraction_progress import LOG_INTERVAL_S, STORE_INTERVAL_S, ProgressReporter
from protocol.wire.messages import Perturbation
from tests.support.devices.device_factory import make_manifest, make_workspace, write_images


class Extraction:
    """An extraction of 1000 images from two backbones, 400 of them cached, at 5 images/s."""

    def __init__(self, store: DeviceState | None) -> None:
        self.now_s = 0.0
        self.reporter = ProgressReporter(store, images=1000, backbones=2, clock=lambda: self.now_s)
        self.reporter.advance(400, 0)

    def compute(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1
            self.reporter.advance(0, 10)


def test_a_service_logs_rate_and_estimate(caplog: pytest.LogCaptureFixture) -> None:
    """Every 30 s; cached images took no time, and an image is done once all backbones are."""
    caplog.set_level(logging.INFO)
    extraction = Extraction(None)
    extraction.compute(75)
    assert LOG_INTERVAL_S == 30
    assert [record.getMessage() for record in caplog.records] == [
        "features computed images=350 total=1000 images_per_s=5 left_s=130",
        "features computed images=500 total=1000 images_per_s=5 left_s=100",
    ]


def test_progress_is_stored_until_the_extraction_is_complete(tmp_path: Path) -> None:
    store = DeviceState(tmp_path)
    extraction = Extraction(store)
    assert store.get(ExtractionProgress) == ExtractionProgress(200, 1000)
    extraction.compute(int(STORE_INTERVAL_S) + 1)
    assert store.get(ExtractionProgress) == ExtractionProgress(225, 1000, 5.0)
    extraction.compute(154)
    assert store.get(ExtractionProgress) == ExtractionProgress()


def test_the_bar_shows_rate_and_estimate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are shown on a terminal, where nothing is logged."""
    caplog.set_level(logging.INFO)
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", terminal)
    extraction = Extraction(None)
    extraction.compute(100)
    extraction.reporter.close()
    assert "70%  5.0 images/s, 0:01:00 left" in terminal.getvalue()
    assert caplog.text == ""


def test_an_extraction_reports_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out and perturbed images count once, also those that are unusable."""
    data = write_images(tmp_path / "data", count=10)
    (data / "cat/broken.png").write_text("broken")
    workspace, reported = make_workspace(tmp_path, holdout=0.4), []
    monkeypatch.setattr(ProgressReporter, "_keep", lambda _self, progress, _now_s: reported.append(progress))
    manifest = make_manifest(perturbation=Perturbation(on="images", scale=0.1))
    workspace.extract(manifest, should_stop=lambda: False)
    assert [(each.done, each.total) for each in (reported[0], reported[-1])] == [(0, 21), (21, 21)]
