"""Prototypes of a device, their encoding, evaluations, and progress."""

import io
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from edge_client.cli import cli
from edge_client.core.state import StoredState
from edge_client.graphs.backbone import Backbone
from edge_client.heads.head import Result
from edge_client.heads.head_evaluation import evaluate_head
from edge_client.images.images import NoImages
from edge_client.kinds.job_progress import ExtractionCounter
from edge_client.kinds.prepared_submission import (
    PreparedSubmission,
)
from edge_client.service.build_report import LOST_IMAGES
from edge_client.service.job_progress import LOG_INTERVAL_S, STORE_INTERVAL_S, ProgressReporter
from edge_client.store.device_state import DeviceState
from edge_client.store.job_folder import Doing
from edge_client.store.stored_values import (
    DeviceName,
    ExtractionProgress,
)
from protocol.errors import BackboneMismatch, ConfigError, ProtofleetError
from protocol.wire.messages import Confused, Perturbation
from tests.support.devices.device_bench import HeadBench
from tests.support.devices.device_factory import (
    CLASSES,
    make_manifest,
    make_submission,
    make_workspace,
    write_images,
)
from tests.support.devices.worker_benches import PUBLIC_MAP, PrivateBench


def _prepare(
    folder: Path, *, secret: bytes = b"s" * 32, manifest: dict[str, Any] | None = None, **local: Any
) -> PreparedSubmission:
    """Prepare a submission of the images in the data folder."""
    workspace, task = make_workspace(folder, **{"holdout": 0.2, **local}), make_manifest(**(manifest or {}))
    workspace.store.secret = secret
    return make_submission(workspace, task, workspace.extract(task))


def test_a_class_with_a_name_that_no_folder_can_have(tmp_path: Path) -> None:
    """It must not end the program, which would end again at each start with the stored task."""
    bench = PrivateBench(tmp_path, differential_privacy=None, classes=(*CLASSES, "\U0001f600" * 128))
    assert bench.upload().images == 80


def test_prototypes_have_the_columns_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same images are in the groups, and no feature is computed again."""
    write_images(tmp_path / "data", count=12)
    every = _prepare(tmp_path)
    monkeypatch.delattr(Backbone, "features")
    chosen = _prepare(tmp_path, manifest={"columns": ((1, 3), (15, 16))})
    np.testing.assert_array_equal(chosen.prototypes, every.prototypes[:, [1, 2, 15]])
    with pytest.raises(BackboneMismatch, match="expected ascending columns of 16 features"):
        _prepare(tmp_path, manifest={"columns": ((1, 3), (15, 17))})


def test_no_usable_image_is_an_error(tmp_path: Path) -> None:
    """The folder has only broken images, no image, or does not exist."""
    data = write_images(tmp_path / "data", count=2)
    for image in data.rglob("*.png"):
        image.write_text("broken")
    with pytest.raises(ProtofleetError, match="none of the 4 images can be used"):
        _prepare(tmp_path)
    (tmp_path / "empty/cat").mkdir(parents=True)
    with pytest.raises(NoImages, match=r"no image of the task's classes .*receives heads"):
        _prepare(tmp_path, data=tmp_path / "empty")
    with pytest.raises(ConfigError):
        _prepare(tmp_path, data=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("alpha", "min_images", "needed"), [(0.99, 2, 2), (1.0, 5, 5), (0.5, 2, 3), (0.5, 1, 1)]
)
def test_the_stated_number_of_images_is_sufficient(
    tmp_path: Path, alpha: float, min_images: int, needed: int
) -> None:
    """One image fewer is not sufficient."""
    manifest = {"alpha": alpha, "min_images": min_images}
    write_images(tmp_path / "enough" / "data", count=needed)
    assert len(_prepare(tmp_path / "enough", holdout=0.0, manifest=manifest).counts) == len(CLASSES)
    if needed > 1:
        write_images(tmp_path / "fewer" / "data", count=needed - 1)
        with pytest.raises(ProtofleetError, match=f" {needed} training images are needed: add images$"):
            _prepare(tmp_path / "fewer", holdout=0.0, manifest=manifest)


def test_classes_that_lose_their_images_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In log, status and info until they are restored; under differential privacy not in the info."""
    bench = PrivateBench(tmp_path, differential_privacy=None)
    bench.store.set(DeviceName("shed-1"))
    lost, away = bench.data / CLASSES[0], tmp_path / "away"

    def state() -> tuple[str, str, list[str]]:
        """Return the warning in info and status, and the new warnings in the log."""
        output = CliRunner().invoke(cli, ["status", "--json", "--state", str(tmp_path / "state")]).output
        logged = [text for text in caplog.messages if text.startswith(LOST_IMAGES)]
        caplog.clear()
        return bench.info().warning, json.loads(output)["warning"], logged

    bench.upload()
    assert state() == ("", "", [])
    lost.rename(away)
    bench.upload()
    warning = f"{LOST_IMAGES}: {lost.name} has 0 of 40 images"
    assert state() == (warning, warning, [f"{LOST_IMAGES} name={lost.name} images=0 before=40"])
    bench.add_images(seed=1)  # of each class: 3 of 40 are far fewer, too
    (bench.data / CLASSES[0]).mkdir(exist_ok=True)
    bench.upload()
    assert state() == (warning.replace("0 of", "3 of"), warning.replace("0 of", "3 of"), [])
    for file in away.iterdir():
        file.rename(lost / file.name)
    bench.upload()
    assert state() == ("", "", [])
    bench.manifest = PrivateBench(tmp_path / "private").manifest
    bench.store.blobs.put(PUBLIC_MAP)
    bench.upload()
    shutil.rmtree(lost)
    bench.restart()
    bench.upload()
    warning = f"{LOST_IMAGES}: {lost.name} has 0 of 43 images"
    assert state() == ("", warning, [f"{LOST_IMAGES} name={lost.name} images=0 before=43"])


def test_same_submission_to_an_earlier_task_has_the_same_digest(tmp_path: Path) -> None:
    """The other task's submission may be received or not; a submission of other images has a greater number."""
    bench = PrivateBench(tmp_path, differential_privacy=None)
    first, other = bench.manifest, make_manifest(batch_size=10, min_images=3, seed=1)
    outbox, before = bench.store.outbox, bench.build().item
    assert before is not None
    outbox.receive(before.digest)
    for is_received in (True, False, True):
        bench.manifest = other
        elsewhere = bench.upload()
        if is_received:
            outbox.receive(outbox.items()[0].digest)
        bench.manifest = first
        assert bench.build().item == before
        assert outbox.items()[0] == before
        assert len({item.digest for item in outbox.items()}) == len(outbox.items())
        outbox.receive(before.digest)
    for seed in range(5):
        bench.add_images(seed=seed)
    newest = bench.upload()
    assert newest.sequence > elsewhere.sequence > bench.read(before).sequence
    shutil.rmtree(bench.data)
    write_images(bench.data, count=40)
    assert bench.upload().sequence > newest.sequence


def test_a_submission_of_images_that_are_gone_still_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without any image nothing is uploaded: status says so, and what removes the last submission."""
    bench = PrivateBench(tmp_path, differential_privacy=None)
    bench.store.set(DeviceName("shed-1"), StoredState(task=bench.task))
    bench.upload()

    def shown() -> str:
        return CliRunner().invoke(cli, ["status", "--state", str(tmp_path / "state")]).output

    advice = "it still counts: `aggregator revoke` and `aggregator forget` remove it"
    assert advice not in shown()
    (item,) = bench.store.outbox.items()
    bench.store.outbox.receive(item.digest)
    shutil.rmtree(bench.data)
    bench.data.mkdir()
    assert "no image of the task's classes" in bench.refused()
    bench.store.set(StoredState(task=bench.task, problems={"build": bench.build().reason}))
    assert advice in shown()
    assert [text for text in caplog.messages if text.startswith(LOST_IMAGES)] == [
        f"{LOST_IMAGES} name={name} images=0 before=40" for name in CLASSES
    ]


def test_task_that_adds_a_class_needs_no_upload_without_its_images(bench: HeadBench) -> None:
    """The submission to the earlier task is that of the new one; with images of the class, another one is built."""
    before, task = bench.submission(), bench.task
    assert before is not None
    added = msgspec.structs.replace(bench.manifest, classes=(*CLASSES, "bird"), continues=(task,))
    bench.follow(added)
    assert bench.submission() == replace(before, task=bench.task)
    write_images(bench.settings.data, count=8, seed=3, classes=("bird",))
    bench.scan()
    after = bench.submission()
    assert after is not None
    assert (after.task, after.digest == before.digest) == (bench.task, False)
    other = msgspec.structs.replace(bench.manifest, classes=("bird", *CLASSES), continues=msgspec.UNSET)
    bench.follow(other)
    assert bench.submission() not in (None, replace(after, task=bench.task))


LIKELY, LEANING = "0.9", "0.4"
"""Images by the probability of the class cat that `_Head` gives them."""


@dataclass
class _Head:
    is_personal: bool = False
    has_novelty: bool = False

    def run(self, features: NDArray[np.float32]) -> Result:
        return Result(np.hstack([features, 1 - features]), features[:, 0] if self.has_novelty else None)


def _chunks(identities: Sequence[str], *_backbones: str) -> Iterator[NDArray[np.float32]]:
    for each in identities:
        yield np.array([[float(each)]], np.float32)


@pytest.mark.parametrize(
    ("cats", "dogs", "labels", "is_personal", "correct", "with_prior"),
    [
        ([LIKELY] * 30 + [LEANING] * 2, [], {}, False, (30, 0), 32),
        ([LIKELY] * 30, [LEANING], {}, False, (30, 1), 30),
        ([LIKELY, LEANING], ["0.1"], {}, False, (1, 1), 2),
        ([LIKELY, LEANING], ["0.1"], {"cat": 30}, False, (1, 1), 2),
        ([LIKELY] * 30 + [LEANING] * 2, [], {"cat": 30}, False, (30, 0), 32),
        ([LIKELY] * 30 + [LEANING] * 2, [], {"dog": 30}, False, (30, 0), 30),
        ([LIKELY] * 30 + [LEANING] * 2, [], {"cat": 30}, True, (30, 0), UNSET),
        ([], [], {}, False, (0, 0), UNSET),
    ],
)
def test_prior_of_held_out_images(
    cats: list[str],
    dogs: list[str],
    labels: dict[str, int],
    *,
    is_personal: bool,
    correct: tuple[int, int],
    with_prior: int | UnsetType,
) -> None:
    """The one of `--prior auto`, by the device's labels or estimated; a personal model, or no image, has none."""
    arguments: dict[str, Any] = {"task": bytes(32), "manifest": make_manifest(), "version": 1}
    workspace, head = SimpleNamespace(cache=SimpleNamespace(chunks=_chunks)), _Head(is_personal)
    found = evaluate_head(
        cast("Any", workspace), cast("Any", head), **arguments, members=[cats, dogs], labels=labels
    )
    assert (found.correct, found.correct_with_prior) == (correct, with_prior)
    wrong = [len(cats) - correct[0], len(dogs) - correct[1]]
    assert set(found.confused or ()) == {
        Confused(n, 1 - n, images) for n, images in enumerate(wrong) if images
    }


def test_predictions_are_counted_by_confidence() -> None:
    """Also of very many images; not without any, and not of a head with a program, whose tensors change it.

    So they are by novelty, if the head has it.
    """
    workspace = SimpleNamespace(cache=SimpleNamespace(chunks=_chunks))
    arguments: dict[str, Any] = {"task": bytes(32), "version": 1}

    def counted(
        members: list[list[str]], head: _Head | None = None, **fields: Any
    ) -> list[dict[int, int] | UnsetType]:
        manifest = msgspec.structs.replace(make_manifest(), **fields)
        found = evaluate_head(
            cast("Any", workspace),
            cast("Any", head or _Head()),
            **arguments,
            manifest=manifest,
            members=members,
            labels={},
        )
        bins = (found.confidence_correct, found.confidence_images, found.novelty_images)
        return [
            UNSET if each is UNSET else {n: count for n, count in enumerate(each) if count} for each in bins
        ]

    members = [[LIKELY] * 30 + [LEANING] * 2, ["0.1", LIKELY]]
    assert counted(members) == [{12: 31}, {12: 32, 8: 2}, UNSET]
    assert counted(members, _Head(has_novelty=True))[2] == {3: 1, 12: 2, 28: 31}
    assert counted([[], []]) == [UNSET] * 3
    assert counted(members, program=SimpleNamespace(persistent=())) == [UNSET] * 3


class Extraction:
    """An extraction of 1000 images from two backbones, 400 of them cached, at 5 images/s."""

    def __init__(self, store: DeviceState | None) -> None:
        self.now_s = 0.0
        self.reporter = ProgressReporter(store, clock=lambda: self.now_s)
        self.counter = ExtractionCounter(
            self.reporter.show, images=1000, backbones=2, clock=lambda: self.now_s
        )
        self.counter.advance(400, 0)

    def compute(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1
            self.counter.advance(0, 10)


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
    extraction.counter.close()
    assert "70%  5.0 images/s, 0:01:00 left" in terminal.getvalue()
    assert caplog.text == ""


def test_an_extraction_reports_its_images(tmp_path: Path) -> None:
    """Held-out and perturbed images count once, also those that are unusable."""
    data = write_images(tmp_path / "data", count=10)
    (data / "cat/broken.png").write_text("broken")
    workspace, reported = make_workspace(tmp_path, holdout=0.4), list[Doing]()
    workspace.show_progress = reported.append
    manifest = make_manifest(perturbation=Perturbation(on="images", scale=0.1))
    workspace.extract(manifest)
    assert [(each.done, each.total) for each in (reported[0], *reported[-2:])] == [(0, 21), (21, 21), (0, 0)]
