"""The attack by time: what a private device publishes, and when, with an image on which a backbone is slow.

The clock is a logical one, on which each image takes a time, so that the load of the machine changes nothing.
"""

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from edge_client.cli import cli
from edge_client.core.events import BuildSubmission, HeadInstalled, InstallHead, SubmissionBuilt
from edge_client.graphs import forked_runs
from edge_client.graphs.backbone import Backbone
from edge_client.images.image_scanner import ImageScanner
from edge_client.kinds import private_submission
from edge_client.privacy.policy import LIMITED_FILES
from edge_client.privacy.sum_mechanism import NoisySums, noisy_sums
from edge_client.privacy.upload_slots import INSTALL_S, next_slot_s, publication_s
from edge_client.service import data_folder
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import LeftOut, NextUpload
from protocol.wire.messages import BlobRef, HeadRef
from tests.support.devices.device_factory import CLASSES, linear_head, tiny
from tests.support.devices.worker_benches import WANTED, JobsBench, PrivateBench

BEGIN_S, PERIOD_S, SLOW_S = 2e9, 600.0, 60.0
BUILDS = 25


class LogicalClock:
    """A clock that images advance, in seconds."""

    def __init__(self) -> None:
        self.now_s = BEGIN_S

    def __call__(self) -> float:
        return self.now_s

    def wait(self, until_s: float) -> None:
        """Let the time come."""
        self.now_s = max(self.now_s, until_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LogicalClock:
    """An image takes about a second, and a white one a minute: a backbone that the owner has allowed."""
    clock, real, random = LogicalClock(), Backbone.features, np.random.default_rng(0)

    def features(backbone: Backbone, pixels: np.ndarray) -> np.ndarray:
        clock.now_s += float(random.uniform(0.5, 1.5)) + SLOW_S * bool((pixels == 255).all())
        return real(backbone, pixels)

    monkeypatch.setattr(Backbone, "features", features)
    return clock


def _bench(folder: Path, clock: LogicalClock, **settings: object) -> PrivateBench:
    bench = PrivateBench(folder, count=3)
    bench.settings = replace(bench.settings, **settings)  # type: ignore[arg-type]
    bench.restart()
    bench.stop()
    bench.worker = JobsBench(bench.settings, bench.store, clock=clock)
    return bench


def _publish(bench: PrivateBench, clock: LogicalClock) -> tuple[float, int]:
    """Return when a submission is published, and its number, both since the start."""
    build = BuildSubmission(bench.task, bench.manifest)
    built = bench.worker.run_until(build, clock.wait)
    assert isinstance(built, SubmissionBuilt)
    assert built.item is not None, built.reason
    return clock.now_s - BEGIN_S, bench.read(built.item).sequence - int(BEGIN_S)


def _white(bench: PrivateBench) -> None:
    Image.new("RGB", (12, 10), "white").save(bench.data / "cat" / "asked-for.png")


def _auc(without: list[float], with_image: list[float]) -> float:
    pairs = [(b > a) + (a == b) / 2 for a, b in itertools.product(without, with_image)]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("period_s", [None, PERIOD_S])
def test_the_time_of_a_submission_does_not_tell_whether_an_image_is_there(
    tmp_path: Path, clock: LogicalClock, period_s: float | None
) -> None:
    """Without a period the attack succeeds always; with one, time and number of all submissions are equal."""
    published: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
    for number, with_image in itertools.product(range(BUILDS), published):
        clock.now_s = BEGIN_S
        bench = _bench(tmp_path / f"{number}-{with_image}", clock, upload_period_s=period_s)
        if with_image:
            _white(bench)
        published[with_image].append(_publish(bench, clock))
        bench.stop()
    times = [[at_s for at_s, _ in each] for each in published.values()]
    if period_s is None:
        assert _auc(*times) == 1
    else:
        assert {*published[False], *published[True]} == {(PERIOD_S, 0)}
        assert _auc(*times) == 0.5


def test_images_that_come_later_are_published_at_the_same_time_whenever_they_come(
    tmp_path: Path, clock: LogicalClock
) -> None:
    """The next build begins at a slot and is published a period later, so that uploads are a period apart at least."""
    published = set()
    for number, after_s in enumerate((10.0, 200.0)):
        clock.now_s = BEGIN_S
        bench = _bench(tmp_path / str(number), clock, upload_period_s=PERIOD_S)
        first = _publish(bench, clock)
        slot_s = next_slot_s(clock.now_s, PERIOD_S, device=bench.settings.device_id, task=bench.task)
        clock.now_s += min(after_s, slot_s - clock.now_s - 1)
        _white(bench)
        at_s, sequence = _publish(bench, clock)
        assert at_s - first[0] >= PERIOD_S
        assert at_s == slot_s + PERIOD_S - BEGIN_S
        assert sequence == int(slot_s) - int(BEGIN_S)
        published.add((at_s, sequence))
        bench.stop()
    assert len(published) == 1


@pytest.mark.parametrize("period_s", [PERIOD_S, INSTALL_S / 3])
def test_an_evaluation_is_published_a_fixed_time_after_its_head(
    tmp_path: Path, clock: LogicalClock, period_s: float
) -> None:
    """A build beside it would make it late. It takes no longer than a period, which holds a build."""
    bench = _bench(tmp_path, clock, upload_period_s=period_s)
    file = linear_head([tiny(bench.folder)], np.ones((16, 2), dtype=np.float32))
    blob = BlobRef(digest=bench.store.blobs.put(file), size_bytes=len(file), name="h")
    head = HeadRef(version=1, head=blob, devices=1, prototypes=1)
    ended = bench.worker.run_until(InstallHead(bench.task, bench.manifest, head), clock.wait)
    assert isinstance(ended, HeadInstalled)
    assert ended.report is not None
    assert clock.now_s == BEGIN_S + min(INSTALL_S, period_s)
    bench.stop()


def test_a_build_that_outlasts_its_period_waits_for_the_next_one_and_the_owner_is_told(
    tmp_path: Path, clock: LogicalClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The time then shows how many periods it took, and no more."""
    bench = _bench(tmp_path, clock, upload_period_s=20.0)
    _white(bench)
    at_s, _ = _publish(bench, clock)
    assert bench.store.get(NextUpload).at_s == BEGIN_S + at_s
    assert at_s % 20 == 0
    assert at_s > SLOW_S
    assert "longer than --upload-period-s" in caplog.text


def test_files_above_the_limit_do_not_count(tmp_path: Path, clock: LogicalClock) -> None:
    """A file that is added displaces at most one other; `status` shows how many do not count."""
    bench = _bench(tmp_path, clock, max_images=5)
    _publish(bench, clock)
    assert bench.store.get(LeftOut).skipped[data_folder.ABOVE_LIMIT] == 3 * len(CLASSES) - 5
    scan = ImageScanner(bench.data).scan(bench.manifest.classes)
    few = data_folder.limited(scan, limit=5, key=b"key")
    _white(bench)
    more = ImageScanner(bench.data).scan(bench.manifest.classes)
    other = data_folder.limited(more, limit=5, key=b"key")
    assert len(few.images) == len(other.images) == 5
    assert len({*few.identities} - {*other.identities}) <= 1
    bench.stop()


def test_a_limit_of_files_doubles_the_noise_and_is_another_release(
    tmp_path: Path, clock: LogicalClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there are fewer files, which depends on images. One key never makes noise of two sizes."""
    noise: list[float] = []

    def record(*given: Any, noise_multiplier: float, **others: Any) -> NoisySums:
        noise.append(noise_multiplier)
        return noisy_sums(*given, noise_multiplier=noise_multiplier, **others)

    monkeypatch.setattr(private_submission, "noisy_sums", record)
    bench = _bench(tmp_path, clock)
    _publish(bench, clock)
    bench.settings = replace(bench.settings, max_images=1000)
    bench.restart()
    assert bench.cost().releases == 2
    assert noise[1] == 2 * noise[0]
    private = msgspec.structs.replace(WANTED, images_per_person=3)
    bench.manifest = msgspec.structs.replace(bench.manifest, differential_privacy=private)
    assert bench.refused() == LIMITED_FILES, "a person's files could displace those of many others"


def test_slots_are_multiples_of_the_period() -> None:
    """Devices and tasks have origins of their own."""
    slots = {next_slot_s(BEGIN_S, 600, device=name, task=b"task") for name in "abc"}
    assert len(slots) == 3
    for slot_s in slots:
        assert 0 < slot_s - BEGIN_S <= 600
    first = min(slots)
    device = next(each for each in "abc" if next_slot_s(BEGIN_S, 600, device=each, task=b"task") == first)
    assert next_slot_s(first + 1, 600, device=device, task=b"task") == pytest.approx(first + 600)
    assert publication_s(100.0, 90.0, 60) == 100
    assert publication_s(100.0, 101.0, 60) == 160
    assert publication_s(100.0, 160.0, 60) == 160


@pytest.mark.parametrize(("period_s", "is_too_short"), [(13.0, True), (15.0, False)])
def test_the_owner_is_told_of_a_period_that_cannot_hold_a_build(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    period_s: float,
    *,
    is_too_short: bool,
) -> None:
    """Six images may take 2 s each, and decoding the first one as long; what they do take changes nothing."""
    monkeypatch.setattr(forked_runs, "BUDGET_FACTOR", 0)  # this machine may be slow
    bench = PrivateBench(tmp_path, count=3, isolate=Backbone.isolated)
    bench.settings = replace(bench.settings, upload_period_s=period_s)
    bench.dry_run(bench.manifest)
    assert ("--upload-period-s is too short" in caplog.text) is is_too_short
    bench.stop()


def test_status_shows_when_the_next_upload_leaves(tmp_path: Path) -> None:
    """Only while the service runs, and until it has left."""
    store = DeviceState(tmp_path / "state", lock=True)
    shown = ["status", "--state", str(tmp_path / "state")]
    store.set(NextUpload(time.time() + 1770))
    assert (
        "upload     at the next slot, in 30 min: --upload-period-s" in CliRunner().invoke(cli, shown).output
    )
    store.set(NextUpload(time.time() - 1))
    assert "upload  " not in CliRunner().invoke(cli, shown).output
    store.set(NextUpload(time.time() + 1770))
    store.close()
    assert "upload  " not in CliRunner().invoke(cli, shown).output
