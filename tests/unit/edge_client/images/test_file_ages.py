"""Files that are still being copied are no images yet: by their ages, and in submissions."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edge_client.images import file_ages
from edge_client.images.file_ages import FileAges
from edge_client.images.image_scanner import BEING_WRITTEN, ImageScanner
from edge_client.images.images import find_images
from edge_client.store.stored_values import LeftOut
from tests.support.devices.device_factory import CLASSES, image_file, make_manifest, make_workspace

SETTLE_S = 2.0
OLD = (1, 1)
"""A time that a copy keeps."""


@dataclass
class Clocks:
    """A monotonic and a wall clock; the files' times are those of a storage whose clock is `ahead_s` of it."""

    now_s: float = 0.0
    ahead_s: float = 0.0
    begin_s: float = field(default_factory=time.time)
    """Of the wall clock, which does not go on by itself: a slow machine makes no file older."""
    ages: FileAges = field(init=False)

    def __post_init__(self) -> None:
        self.ages = FileAges(clock=lambda: self.now_s, wall_clock=lambda: self.wall_s - self.ahead_s)

    @property
    def wall_s(self) -> float:
        return self.begin_s + self.now_s

    def complete(self, data: Path, *, after_s: float = 0.0) -> list[str]:
        """Return the images that are complete in a scan after some seconds."""
        self.now_s += after_s
        images = find_images(data, CLASSES)
        ages = self.ages.update(images)
        return [image.path.name for image, age_s in zip(images, ages, strict=True) if age_s >= SETTLE_S]


@pytest.fixture(autouse=True)
def settling(monkeypatch: pytest.MonkeyPatch, no_settling: None) -> None:
    monkeypatch.setattr(file_ages, "SETTLE_S", SETTLE_S)


def test_old_files_are_complete_in_the_first_scan(tmp_path: Path) -> None:
    image_file(tmp_path / "cat/1.png")
    assert Clocks(now_s=10.0).complete(tmp_path) == ["1.png"]


def test_a_file_that_was_changed_a_moment_ago_is_not(tmp_path: Path) -> None:
    """Also where the copy has set the old time again, and where the storage's clock is ahead."""
    path = image_file(tmp_path / "cat/1.png")
    os.utime(path, OLD)
    for ahead_s in (0.0, 3600.0):
        clocks = Clocks(ahead_s=ahead_s, begin_s=path.stat().st_ctime)
        assert clocks.complete(tmp_path) == []
        assert clocks.complete(tmp_path, after_s=1.0) == []
        assert clocks.complete(tmp_path, after_s=1.0) == ["1.png"]


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def _fill(path: Path) -> None:
    """Write a block into a file of the final size, as Windows does."""
    with path.open("r+b") as file:
        file.write(b"block")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def _replace(path: Path) -> None:
    """Put another file of the same size and time in its place."""
    status = path.stat()
    path.with_suffix(".tmp").write_bytes(bytes(status.st_size))
    path.with_suffix(".tmp").replace(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [_grow, _fill, _replace])
def test_a_change_between_two_scans_counts_whatever_the_clocks_say(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """A storage whose clock is an hour behind has no new files by its times."""
    image_file(tmp_path / "cat/1.png")
    clocks = Clocks(ahead_s=-3600.0)
    clocks.complete(tmp_path)
    new = image_file(tmp_path / "cat/2.png")
    assert clocks.complete(tmp_path) == ["1.png"]
    for _ in range(3):
        change(new)
        assert clocks.complete(tmp_path, after_s=1.0) == ["1.png"]
    assert clocks.complete(tmp_path, after_s=SETTLE_S + 1.0) == ["1.png", "2.png"]


def test_a_complete_file_stays_complete_if_only_its_inode_changes(tmp_path: Path) -> None:
    """Some file systems number files anew whenever they are read."""
    path, clocks = image_file(tmp_path / "cat/1.png"), Clocks(now_s=10.0)
    clocks.complete(tmp_path)
    _replace(path)
    assert clocks.complete(tmp_path) == ["1.png"]


class Device:
    """A device in whose data folder a program writes `2.png`, beside an old `1.png`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clocks, self.workspace = Clocks(now_s=10.0), make_workspace(folder)
        self.workspace.find = ImageScanner(self.workspace.settings.data, self.clocks.ages).scan
        self.is_written, self.pauses = False, list[float]()
        image_file(folder / "data/cat/1.png")
        self.new = image_file(folder / "data/cat/2.png")
        self.write()
        monkeypatch.setattr(time, "sleep", self._pause)

    def write(self) -> None:
        os.utime(self.new, (self.clocks.wall_s, self.clocks.wall_s))

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.clocks.now_s += seconds
        if self.is_written:
            self.write()

    def find(self, **task: Any) -> list[str]:
        self.scan = self.workspace.find_images(make_manifest(**task))
        return [image.path.name for image in self.scan.images]

    @property
    def skipped(self) -> dict[str, int]:
        """The files that `edge-client status` names."""
        return dict(self.workspace.store.get(LeftOut).skipped)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(tmp_path, monkeypatch)


def test_the_first_scan_waits_until_files_may_be_complete(device: Device) -> None:
    """With `--once` and in a dry run it is the only one. Later scans do not wait."""
    assert device.find() == ["1.png", "2.png"]
    (pause_s,) = device.pauses
    assert 0 < pause_s <= SETTLE_S
    device.write()
    assert device.find() == ["1.png"]
    device.clocks.now_s += SETTLE_S
    assert device.find() == ["1.png", "2.png"]
    assert len(device.pauses) == 1


def test_images_of_a_new_task_are_not_new(device: Device) -> None:
    """Its classes have other folders, which the first scan of it takes as a start does."""
    device.find(classes=("dog",))
    assert device.find() == ["1.png", "2.png"]


def test_a_file_that_is_written_all_the_time_is_named_and_left_out(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not missing, either: its earlier version was not deleted."""
    device.find()
    before = device.scan.identities
    device.write()
    for _ in range(2):
        assert device.find() == ["1.png"]
    assert device.scan.missing(before) == set()
    assert device.skipped == {BEING_WRITTEN: 1}
    assert caplog.text.count(BEING_WRITTEN) == 1
    device.clocks.now_s += SETTLE_S
    assert device.find() == ["1.png", "2.png"]
    assert device.skipped == {}
    assert len(device.scan.missing(before)) == 1


def test_the_first_scan_waits_only_once(device: Device) -> None:
    device.is_written = True
    assert device.find() == ["1.png"]
    assert len(device.pauses) == 1
