"""Intake of uploads on a real disk, over restarts; and its status."""

import contextlib
import functools
import os
import re
import shutil
from pathlib import Path

import pytest

from aggregator.intake import uploads as intake
from aggregator.intake.uploads import Uploads
from aggregator.intake.validation import Refused
from aggregator.storage import stop_reason
from aggregator.storage.open_store import open_store
from aggregator.storage.stop_reason import StopReason
from aggregator.storage.store import Store
from protocol.errors import StateError, ThreadFailed
from protocol.wire.codec import digest_of
from protocol.wire.messages import Receipt
from protocol.wire.transfer import frames_of
from tests.support.machine_faults import fill, full_disk, small_disk

PAYLOAD = bytes(range(256)) * 960
DIGEST = digest_of(PAYLOAD)
FRAMES = list(frames_of(PAYLOAD, digest=DIGEST))
"""Four of 61,440 bytes."""
LARGE = bytes(range(256)) * 20_000
"""More than an upload may take in memory."""
LARGE_FRAMES = list(frames_of(LARGE, digest=digest_of(LARGE)))


def _uploads(store: Store, *, max_bytes: int = 6 * 10**6) -> Uploads:
    return Uploads(store, max_bytes=max_bytes, on_failure=_raise)


def _raise(failure: ThreadFailed) -> None:
    raise failure


def _take_all(uploads: Uploads, payload: bytes) -> None:
    for frame in frames_of(payload, digest=digest_of(payload)):
        uploads.take("a", frame)


def _files(store: Store) -> list[Path]:
    return list((store.folder / "incoming").iterdir())


def test_restart_begins_unfinished_uploads_again(store: Store) -> None:
    """Those in memory and those in files, which the start deletes."""
    first = _uploads(store)
    first.take("a", FRAMES[0])
    for frame in LARGE_FRAMES[:-1]:
        first.take("b", frame)
    assert len(_files(store)) == 1
    second = _uploads(store)
    assert _files(store) == []
    missing = ((0, len(PAYLOAD) - len(FRAMES[3].data)),)
    assert second.take("a", FRAMES[3]) == Receipt(digest=DIGEST, status="missing", missing=missing)
    assert [second.take("a", frame) for frame in FRAMES[:3]][-1] == PAYLOAD
    assert [second.take("b", frame) for frame in LARGE_FRAMES][-1] == LARGE


def test_upload_without_frames_is_deleted(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "UNFINISHED_S", -1.0)
    uploads = _uploads(store)
    for frame in LARGE_FRAMES[:-1]:
        uploads.take("a", frame)
    with caplog.at_level("INFO"):
        uploads.tick()
    assert f"unfinished upload deleted device=a digest={LARGE_FRAMES[0].digest.hex()}" in caplog.text
    assert _files(store) == []


def test_deleted_folder_is_an_error_until_the_next_start(store: Store) -> None:
    """Devices send their uploads again."""
    uploads = _uploads(store)
    shutil.rmtree(store.folder / "incoming")
    with pytest.raises(StateError, match="cannot use"):
        _take_all(uploads, LARGE)
    uploads = _uploads(store)
    assert [uploads.take("a", frame) for frame in LARGE_FRAMES][-1] == LARGE


def test_start_needs_room_for_an_upload() -> None:
    """A 20th of the disk is enough, although an upload may be larger; the error says what is needed."""
    with small_disk(size_bytes=8 * 1024**2) as disk, contextlib.closing(open_store(disk / "state")) as store:
        fill(disk)
        needed = f"not enough disk space in {store.folder}: 0.4 MB needed, 0.0 MB available"
        with pytest.raises(StateError, match=re.escape(needed)):
            _uploads(store, max_bytes=10**8)
        os.truncate(disk / "filler", (disk / "filler").stat().st_size - 10**6)
        _uploads(store, max_bytes=10**8)


def test_start_deletes_unfinished_uploads_that_fill_the_disk() -> None:
    """Otherwise no upload could ever end."""
    with small_disk(size_bytes=8 * 1024**2) as disk, contextlib.closing(open_store(disk / "state")) as store:
        uploads = _uploads(store, max_bytes=10**8)
        payload = bytes(6 * 10**6)
        frames = list(frames_of(payload, digest=digest_of(payload)))
        uploads.take("a", frames[0])
        fill(disk)
        with pytest.raises(StateError, match="No space left"):
            list(map(functools.partial(uploads.take, "a"), frames[1:]))
        (disk / "filler").unlink()
        uploads = _uploads(store, max_bytes=10**8)
        assert _files(store) == []
        assert [uploads.take("a", frame) for frame in FRAMES][-1] == PAYLOAD


def test_unfinished_uploads_leave_the_room_that_a_start_needs() -> None:
    """On a disk with less room than all files may take: one that does not fit is refused, and nothing fails."""
    with small_disk(size_bytes=16 * 1024**2) as disk, contextlib.closing(open_store(disk / "state")) as store:
        uploads = _uploads(store, max_bytes=10**8)
        payloads = [bytes([number]) * 6 * 10**6 for number in range(3)]
        first, *others = ([*frames_of(each, digest=digest_of(each))] for each in payloads)
        for frame in first[:-1]:
            uploads.take("a", frame)
        for frame in others[0][:-1]:
            uploads.take("b", frame)
        for frames in (others[1], [*frames_of(bytes(10**7), digest=digest_of(bytes(10**7)))]):
            with pytest.raises(Refused, match="not enough disk space"):
                uploads.take("c", frames[-1])
        assert intake.missing_room(disk, 10**8) == ""
        assert uploads.take("a", first[-1]) == payloads[0]
        assert isinstance(uploads.take("c", others[1][-1]), Receipt)


def test_status_is_written_on_a_full_disk(tmp_path: Path) -> None:
    """The file never changes its size, whatever the reason."""
    stop_reason.create(tmp_path)
    assert stop_reason.read(tmp_path) == StopReason()
    (file,) = tmp_path.iterdir()
    size_bytes = file.stat().st_size
    stopped = StopReason(12.5, "Kein Platz: \x00\u2026" * 100)
    with full_disk(after_bytes=size_bytes):
        stop_reason.write(tmp_path, stopped)
        found = stop_reason.read(tmp_path)
        assert found.stopped_s == 12.5
        assert stopped.reason.startswith(found.reason)
        assert len(found.reason) > 100
        stop_reason.write(tmp_path, StopReason())
    assert stop_reason.read(tmp_path) == StopReason()
    assert file.stat().st_size == size_bytes


@pytest.mark.parametrize("contents", [b"", b"noise", b'{"stopped_s": "x"}', os.urandom(1000)])
def test_unreadable_status_is_a_working_intake(tmp_path: Path, contents: bytes) -> None:
    """A missing one, before the first start, is one too."""
    assert stop_reason.read(tmp_path) == StopReason()
    stop_reason.create(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(contents)
    assert stop_reason.read(tmp_path) == StopReason()


def test_deleted_file_is_a_state_error(tmp_path: Path) -> None:
    """It is not created again: a full disk could leave half a file."""
    with pytest.raises(StateError, match=r"intake\.json: No such file"):
        stop_reason.write(tmp_path, StopReason())
