"""A device whose disk is almost full writes nothing large, reports it, and goes on once there is space."""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from edge_client.core import events
from edge_client.core.state import MissingSpace, Mode, State
from edge_client.core.state_machine import step
from edge_client.store import disk_space
from edge_client.store.device_state import DeviceState
from edge_client.store.disk_space import DiskAlmostFull, free_bytes
from protocol.wire.codec import digest_of
from protocol.wire.messages import BlobRef, DifferentialPrivacy, HeadManifest, HeadRef
from tests.support.devices.device_bench import DeviceBench, HeadBench
from tests.support.devices.device_factory import (
    TINY,
    image_file,
    make_manifest,
    make_workspace,
    write_images,
)
from tests.support.devices.job_states import keep_item
from tests.support.devices.worker_benches import PUBLIC_MAP, WANTED, private_task
from tests.support.simulation.fleet import reference

GIB = 1024**3
HUGE = tuple(
    BlobRef(digest=bytes([number]) * 32, size_bytes=2 * GIB, name=f"backbone {number}")
    for number in range(16)
)
TASK = b"t" * 32


class Disk(NamedTuple):
    """A result of `shutil.disk_usage`."""

    total: int
    used: int
    free: int


class Disks:
    """A disk of 100 GiB; `free` is beside the reserve of 1 GiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 99 * GIB
        monkeypatch.setattr(disk_space, "disk_usage", lambda _: Disk(100 * GIB, 0, self.free + GIB))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disks:
    return Disks(monkeypatch)


@pytest.mark.parametrize(("total", "reserve"), [(10 * GIB, GIB // 2), (1000 * GIB, GIB)])
def test_the_reserve_is_a_share_of_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, total: int, reserve: int
) -> None:
    monkeypatch.setattr(disk_space, "disk_usage", lambda _: Disk(total, 0, 5 * GIB))
    assert free_bytes(tmp_path) == 5 * GIB - reserve
    monkeypatch.setattr(disk_space, "disk_usage", lambda _: Disk(0, 0, 0))
    assert free_bytes(tmp_path) > 2**60, "a file system that does not say"


def test_a_task_that_does_not_fit_the_disk_is_not_downloaded(disk: Disks, tmp_path: Path) -> None:
    """Nothing of 16 backbones of 2 GiB with room for 15; the operator reads why, and it begins once there is room."""
    bench = DeviceBench(tmp_path).start().connect()
    disk.free = 30 * GIB
    bench.announce(make_manifest(backbones=HUGE)).wait()
    problem = bench.status["problem"]
    assert problem == (
        "not enough disk space for the task's 16 missing files: 34,360 MB needed, 32,212 MB available (5% of the disk, "
        "at most 1 GiB, stays free): free space on the device"
    )
    assert (bench.requests, bench.info.problem) == ([], problem)
    disk.free = 32 * GIB
    bench.wait()
    assert {each.digest for each in bench.requests} == {HUGE[0].digest}
    assert (bench.status["problem"], bench.info.problem) == ("", "")


def test_a_download_stops_where_others_have_taken_the_space(disk: Disks, tmp_path: Path) -> None:
    """Frames that are under way are dropped, and it resumes where it was."""
    bench, data = DeviceBench(tmp_path).start().connect(), bytes(range(256)) * 400
    blob = reference(data, "backbone")
    bench.announce(make_manifest(backbones=(blob,)))
    bench.broadcast(data, ranges=((0, 50_000),))
    disk.free = 50_000
    bench.broadcast(data, ranges=((50_000, 60_000), (60_000, 70_000)))
    assert bench.store.blobs.partial_bytes(blob.digest) == 50_000
    assert "0 MB available" in bench.status["problem"]
    disk.free = GIB
    bench.wait()
    assert bench.requests[-1].offset == 50_000
    bench.broadcast(data, ranges=((50_000, len(data)),))
    assert bench.store.blobs.read(blob.digest) == data


def test_features_leave_the_reserve(disk: Disks, tmp_path: Path) -> None:
    """No batch is stored that needs it; what was stored before is used once there is space."""
    write_images(tmp_path / "data", count=6)
    workspace, manifest = make_workspace(tmp_path), make_manifest()
    disk.free = 12 * (4 * 16 + 512) - 1
    with pytest.raises(DiskAlmostFull, match="for the features of 12 images") as raised:
        workspace.extract(manifest)
    assert workspace.cache.known(TINY.digest.hex()) == set()
    disk.free = raised.value.missing.needed_bytes
    assert len(workspace.extract(manifest).usable) == 12


@pytest.mark.parametrize("privacy", [None, WANTED], ids=["none", "differential privacy"])
def test_a_build_that_needs_the_reserve_is_repeated(
    disk: Disks, tmp_path: Path, privacy: DifferentialPrivacy | None
) -> None:
    """It is no failure of the task; under differential privacy it is the same release, which is charged once."""
    bench = HeadBench(tmp_path)
    bench.store.blobs.put(PUBLIC_MAP)
    disk.free = 0
    image_file(tmp_path / "data" / "cat" / "new.png")
    bench.follow(make_manifest(**({"seed": 1} if privacy is None else private_task())))
    for _ in range(2):
        assert "not enough disk space" in bench.wait().status["problem"]
        assert bench.submission() is None
    disk.free = GIB
    assert bench.wait().submission() is not None
    assert bench.status["problem"] == ""
    assert len(bench.store.ledger.releases()) == (privacy is not None)


def test_a_build_without_space_for_the_last_submission_is_repeated(disk: Disks, tmp_path: Path) -> None:
    """The job gets a copy of it. Nothing is charged before, and the program continues."""
    bench = HeadBench(tmp_path)
    bench.store.blobs.put(PUBLIC_MAP)
    bench.follow(make_manifest(**private_task()))
    before = bench.submission()
    disk.free = 0
    image_file(tmp_path / "data" / "cat" / "new.png")
    for _ in range(2):
        assert "not enough disk space for a copy of the last submission" in bench.scan().status["problem"]
    assert bench.submission() == before
    assert len(bench.store.ledger.releases()) == 1
    assert list((bench.state / "jobs").iterdir()) == []
    disk.free = GIB
    assert bench.scan().submission() not in (None, before)
    assert bench.status["problem"] == ""


@pytest.mark.parametrize("kind", ["submission", "evaluation"])
def test_only_submissions_leave_the_reserve(disk: Disks, tmp_path: Path, kind: str) -> None:
    """The reserve is for small things, such as an evaluation or a receipt."""
    state = DeviceState(tmp_path / "state")
    disk.free = 0
    if kind == "submission":
        with pytest.raises(DiskAlmostFull):
            keep_item(state, b"payload")
    else:
        assert keep_item(state, b"payload", kind="evaluation").size_bytes == 7


READY = State(
    mode=Mode.SERVICE,
    stored=frozenset({TINY.digest}),
    connected=True,
    has_record=True,
    record_due_s=math.inf,
)
SPACE = MissingSpace(Path(), 7, "the disk is almost full")


@pytest.mark.parametrize("mode", Mode)
def test_a_job_without_space_is_repeated(mode: Mode) -> None:
    """As soon as there is some, or for a newer manifest; with --once and in a dry run the program ends."""
    manifest = make_manifest()
    state, actions = step(replace(READY, mode=mode), events.TaskSeen(TASK, manifest), now_s=0)
    build = events.BuildSubmission(TASK, manifest)
    assert actions == (build,)
    state, actions = step(state, events.SpaceMissing(SPACE, "build"), now_s=1)
    if mode is not Mode.SERVICE:
        assert actions == (events.Exit(1, SPACE.reason),)
        return
    assert actions == (events.Log(SPACE.reason, error=True),)
    waiting, actions = step(state, events.Ticked(), now_s=2)
    assert actions == ()
    assert step(waiting, events.SpaceFreed(frozenset({"build"})), now_s=3)[1] == (build,)
    small = HeadRef(version=1, head=reference(b"head", "head"), devices=1, prototypes=1)
    state, actions = step(waiting, HeadManifest(task=TASK, current=small), now_s=3)
    assert build in actions
    assert step(state, HeadManifest(task=TASK, current=small), now_s=4)[1] == ()


def test_an_installation_without_space_is_repeated() -> None:
    manifest, head = make_manifest(), reference(b"head", "head")
    announced = HeadManifest(task=TASK, current=HeadRef(version=1, head=head, devices=1, prototypes=1))
    state = replace(READY, stored=READY.stored | {digest_of(b"head")}, images_changed=False)
    state = replace(state, task=TASK, manifest=manifest)
    state, actions = step(state, announced, now_s=0)
    install = events.InstallHead(TASK, manifest, announced.current)
    assert actions == (install,)
    state, _ = step(state, events.SpaceMissing(SPACE, "install"), now_s=1)
    assert step(state, events.SpaceFreed(frozenset({"install"})), now_s=2)[1] == (install,)


def test_work_that_lacks_space_stops_no_other_work() -> None:
    """Neither features nor a download that do not fit stop a head; each begins once there is space for it."""
    manifest, small, large = make_manifest(), reference(b"head", "head"), HUGE[0]
    state = replace(READY, task=TASK, manifest=manifest)
    state, _ = step(state, events.SpaceMissing(SPACE, "build"), now_s=0)
    first = HeadManifest(task=TASK, current=HeadRef(version=1, head=large, devices=1, prototypes=1))
    state = replace(state, head=first)
    state, _ = step(state, events.SpaceMissing(SPACE, "download"), now_s=1)
    assert step(state, events.Ticked(), now_s=2)[1] == ()
    state, actions = step(state, events.SpaceFreed(frozenset({"download"})), now_s=2)
    assert actions == (events.OpenDownload(large, (large,)),)
    assert state.space_problem == SPACE.reason
    head = HeadRef(version=2, head=small, devices=1, prototypes=1)
    ready = replace(state, stored=state.stored | {small.digest}, head=HeadManifest(task=TASK, current=head))
    ready, actions = step(ready, events.Ticked(), now_s=3)
    assert actions == (events.InstallHead(TASK, manifest, head),)
    freed, actions = step(ready, events.SpaceFreed(frozenset({"build"})), now_s=4)
    assert actions == (events.BuildSubmission(TASK, manifest),)
    assert freed.space_problem == ""
