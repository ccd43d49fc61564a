"""Intake of uploads on a real disk: durable before acknowledged, over restarts, stops and kills; and its status."""

import contextlib
import os
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from aggregator.coordination.round_state import Entry
from aggregator.intake import chunk_store, intake_status
from aggregator.intake import uploads as intake
from aggregator.intake.assembly import Assembly
from aggregator.intake.chunk_store import ChunkStore, contiguous
from aggregator.intake.intake_status import IntakeStatus
from aggregator.intake.reassembly import Complete, Key, Transfer
from aggregator.intake.uploads import Uploads
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from protocol.errors import StateError
from protocol.wire.codec import digest_of
from protocol.wire.messages import Frame, Receipt
from protocol.wire.transfer import Ranges, frames_of
from tests.support.machine_faults import fill, full_disk, small_disk
from tests.support.messages.submissions import TASK

PAYLOAD = bytes(range(256)) * 960
DIGEST = digest_of(PAYLOAD)
FRAMES = list(frames_of(PAYLOAD, digest=DIGEST))
"""Four of 61,440 bytes."""
COMPLETE = Complete(DIGEST, PAYLOAD)


@pytest.fixture(autouse=True)
def trials_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "TRIAL_S", 0.0)


def _uploads(store: Store, *, unfinished_s: float = 3600.0) -> Uploads:
    return Uploads(store, max_bytes=10**6, unfinished_s=unfinished_s)


def _stored(store: Store) -> int:
    """Unfinished transfers on the disk, in the index and in files."""
    files = list((store.folder / "incoming").iterdir())
    assert len(ChunkStore(store.folder).load()) == len(files)
    return len(files)


def test_upload_continues_after_a_restart(store: Store) -> None:
    """Committed frames are not requested again, others are."""
    first = _uploads(store)
    first.take("a", FRAMES[0])
    first.commit()
    first.take("a", FRAMES[1])
    second = _uploads(store)
    size = len(FRAMES[0].data)
    missing = ((size, 3 * size),)
    assert second.take("a", FRAMES[3]) == Receipt(digest=DIGEST, status="missing", missing=missing)
    second.commit()
    second.take("a", FRAMES[2])
    assert second.take("a", FRAMES[1]) == COMPLETE
    second.commit()
    assert _stored(store) == 0


def test_upload_that_was_stored_meanwhile_is_deleted_at_the_start(store: Store) -> None:
    """A kill between storing a submission and deleting its frames."""
    uploads = _uploads(store)
    uploads.take("a", FRAMES[0])
    uploads.commit()
    store.submissions.put(TASK, SubmissionRecord("a", Entry(1, DIGEST, 0.0), len(PAYLOAD), 1, 1, {0: 1}))
    _uploads(store)
    assert _stored(store) == 0


def test_upload_without_frames_expires(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    uploads = _uploads(store, unfinished_s=-1.0)
    uploads.take("a", FRAMES[0])
    uploads.commit()
    with caplog.at_level("INFO"):
        uploads.tick()
    assert f"unfinished upload deleted device=a digest={DIGEST.hex()}" in caplog.text
    assert _stored(store) == 0


def test_stopped_intake_answers_the_last_frame_only(store: Store) -> None:
    """A device gets one receipt for each query, and nothing is stored."""
    uploads = _uploads(store)
    uploads.stop(StateError("the disk is full"))
    assert [uploads.take("a", frame) for frame in FRAMES[:3]] == [None] * 3
    receipt = uploads.take("a", FRAMES[3])
    assert isinstance(receipt, Receipt)
    assert (receipt.status, receipt.reason) == ("refused", "no_space")
    uploads.commit()
    assert _stored(store) == 0


def test_deleted_folder_stops_the_intake_until_it_is_created_again(store: Store) -> None:
    """Devices send their chunks again."""
    uploads = _uploads(store)
    uploads.take("a", FRAMES[0])
    uploads.commit()
    shutil.rmtree(store.folder / "incoming")
    uploads.take("a", FRAMES[1])
    with pytest.raises(StateError, match="cannot use") as caught:
        uploads.commit()
    uploads.stop(caught.value)
    assert uploads.tick()
    assert [uploads.take("a", frame) for frame in FRAMES][-1] == COMPLETE


def test_small_disk_resumes_once_it_has_room(caplog: pytest.LogCaptureFixture) -> None:
    """With a 20th of its space, although an upload may be larger; log and status say what is needed."""
    with small_disk(size_bytes=8 * 1024**2) as disk, contextlib.closing(open_store(disk / "state")) as store:
        uploads = Uploads(store, max_bytes=10**8, unfinished_s=3600.0)
        fill(disk)
        uploads.stop(StateError("the disk is full"))
        for _ in range(2):
            assert not uploads.tick()
        reason = f"not enough disk space in {store.folder}/incoming: 0.4 MB needed, 0.0 MB available"
        assert intake_status.read(store.folder).reason == reason
        assert caplog.text.count("intake still stopped") == 1
        os.truncate(disk / "filler", (disk / "filler").stat().st_size - 10**6)
        assert uploads.tick()
        assert intake_status.read(store.folder) == intake_status.IntakeStatus()


def test_unfinished_uploads_that_fill_the_disk_make_room() -> None:
    """One at each trial, the one without frames for longest; otherwise no upload could ever end."""
    with small_disk(size_bytes=8 * 1024**2) as disk, contextlib.closing(open_store(disk / "state")) as store:
        uploads = Uploads(store, max_bytes=10**8, unfinished_s=3600.0)
        uploads.take("a", FRAMES[0])
        uploads.commit()
        for frame in long_frames()[:100]:
            uploads.take("b", frame)
        uploads.commit()
        for frame in long_frames()[100:300]:
            uploads.take("b", frame)
        with pytest.raises(StateError, match="No space left") as caught:
            uploads.commit()
        uploads.stop(caught.value)
        assert not uploads.tick()
        assert not list((store.folder / "incoming").glob("a-*"))
        assert uploads.tick()
        assert [uploads.take("a", frame) for frame in FRAMES][-1] == COMPLETE
        uploads.commit()


def long_frames() -> list[Frame]:
    payload = np.random.default_rng(0).bytes(20_000_000)
    return list(frames_of(payload, digest=digest_of(payload), chunk_bytes=50_000))


def test_status_is_written_on_a_full_disk(tmp_path: Path) -> None:
    """The file never changes its size, whatever the reason."""
    intake_status.create(tmp_path)
    assert intake_status.read(tmp_path) == IntakeStatus()
    (file,) = tmp_path.iterdir()
    size_bytes = file.stat().st_size
    stopped = IntakeStatus(12.5, "Kein Platz: \x00\u2026" * 100)
    with full_disk(after_bytes=size_bytes):
        intake_status.write(tmp_path, stopped)
        found = intake_status.read(tmp_path)
        assert found.stopped_s == 12.5
        assert stopped.reason.startswith(found.reason)
        assert len(found.reason) > 100
        intake_status.write(tmp_path, IntakeStatus())
    assert intake_status.read(tmp_path) == IntakeStatus()
    assert file.stat().st_size == size_bytes


@pytest.mark.parametrize("contents", [b"", b"noise", b'{"stopped_s": "x"}', os.urandom(1000)])
def test_unreadable_status_is_a_working_intake(tmp_path: Path, contents: bytes) -> None:
    """A missing one, before the first start, is one too."""
    assert intake_status.read(tmp_path) == IntakeStatus()
    intake_status.create(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(contents)
    assert intake_status.read(tmp_path) == IntakeStatus()


def test_deleted_file_is_a_state_error(tmp_path: Path) -> None:
    """It is not created again: a full disk could leave half a file."""
    with pytest.raises(StateError, match=r"intake\.json: No such file"):
        intake_status.write(tmp_path, IntakeStatus())


ONE, TWO = ("a", digest_of(b"one")), ("b", digest_of(b"two"))
BLOCK = bytes(range(256)) * 240
"""61,440 bytes."""
SIZE = 10 * len(BLOCK)


def _arrived(key: Key, *pieces: tuple[int, bytes], after: Ranges = (), seen_s: float = 1.0) -> Transfer:
    transfer = Transfer(key, Assembly(key[1], SIZE, stored=after), seen_s, after)
    for offset, data in pieces:
        transfer.assembly.add(Frame(v=1, digest=key[1], size_bytes=SIZE, offset=offset, data=data))
    return transfer


def _loaded(store: ChunkStore) -> dict[Key, tuple[float, Ranges]]:
    loaded = store.load()
    assert all(each.stored == each.assembly.ranges() and not each.assembly.fresh for each in loaded)
    assert [each.seen_s for each in loaded] == sorted(each.seen_s for each in loaded)
    return {each.key: (each.seen_s, each.stored) for each in loaded}


def _files(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "incoming").iterdir())


def test_committed_ranges_survive_a_restart(tmp_path: Path) -> None:
    """Adjacent ranges are joined; each transfer has its own bytes, in order, and the time of its last frame."""
    store = ChunkStore(tmp_path)
    store.commit([_arrived(ONE, (len(BLOCK), BLOCK), (5, b"x")), _arrived(TWO, (0, b"two"))], [])
    stored = ((5, 6), (len(BLOCK), 2 * len(BLOCK)))
    store.commit([_arrived(ONE, (6, b"yz"), after=stored, seen_s=2.0)], [])
    again = ChunkStore(tmp_path)  # the first one is never closed, as if it had been killed
    stored = ((5, 8), (len(BLOCK), 2 * len(BLOCK)))
    assert _loaded(again) == {TWO: (1.0, ((0, 3),)), ONE: (2.0, stored)}
    assert again.read(ONE, stored) == [(5, b"xyz"), (len(BLOCK), BLOCK)]


def test_bytes_are_durable_once_they_are_in_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and its name in the folder are synced."""
    synced, fsync = set[int](), os.fsync

    def record(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    ChunkStore(tmp_path).commit([_arrived(ONE, (0, b"one"))], [])
    folder = tmp_path / "incoming"
    assert {each.stat().st_ino for each in (folder, *folder.iterdir())} <= synced


def test_ended_transfer_is_deleted_and_can_begin_anew_in_the_same_batch(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    store.commit([_arrived(ONE, (0, b"one")), _arrived(TWO, (0, b"two"))], [])
    store.commit([_arrived(ONE, (1, b"new"), seen_s=3.0)], [ONE, TWO])
    assert _loaded(store) == {ONE: (3.0, ((1, 4),))}
    assert store.read(ONE, ((1, 4),)) == [(1, b"new")]
    assert len(_files(tmp_path)) == 1


def test_full_disk_stores_nothing_of_a_batch(tmp_path: Path) -> None:
    """Earlier chunks stay, and with space again the same batch is stored."""
    store = ChunkStore(tmp_path)
    store.commit([_arrived(ONE, (0, BLOCK))], [])
    before = _loaded(store)
    batch = [_arrived(TWO, (0, BLOCK * 4))]
    with full_disk(after_bytes=60_000):
        with pytest.raises(StateError, match=r"cannot use .*incoming"):
            store.commit(batch, [ONE])
        with pytest.raises(StateError, match=r"cannot use .*incoming"):
            store.check_writable(1_000_000)
        assert _loaded(store) == before
        assert store.read(ONE, ((0, len(BLOCK)),)) == [(0, BLOCK)]
    store.check_writable(1_000_000)
    store.commit(batch, [ONE])
    assert _loaded(store) == {TWO: (1.0, ((0, 4 * len(BLOCK)),))}


def test_bytes_that_the_index_does_not_list_do_not_count(tmp_path: Path) -> None:
    """A kill after the bytes are on the disk and before the index lists them: they are sent again."""
    store = ChunkStore(tmp_path)
    store.commit([_arrived(ONE, (0, b"one"))], [])
    chunk_store._write(store._path(ONE), [(3, b"???")])
    chunk_store._write(store._path(TWO), [(0, b"two")])
    again = ChunkStore(tmp_path)
    assert _loaded(again) == {ONE: (1.0, ((0, 3),))}
    assert len(_files(tmp_path)) == 1
    again.commit([_arrived(ONE, (3, b"two"), after=((0, 3),))], [])
    assert again.read(ONE, ((0, 6),)) == [(0, b"onetwo")]


@pytest.mark.parametrize("damage", ["empty", "torn", "gone", "no ranges", "odd ranges"])
def test_lost_bytes_cost_their_transfer_and_no_other(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that a power cut has shortened, or an index that contradicts itself: the device sends all again."""
    store = ChunkStore(tmp_path)
    store.commit([_arrived(ONE, (0, b"one")), _arrived(TWO, (0, b"two"))], [])
    (file,) = (tmp_path / "incoming").glob("a-*")
    if damage == "gone":
        file.unlink()
    elif damage in {"empty", "torn"}:
        os.truncate(file, 0 if damage == "empty" else 2)
    else:
        with sqlite3.connect(tmp_path / "incoming.sqlite") as database:
            ranges = b"\x90" if damage == "no ranges" else b"\xc1"
            database.execute("UPDATE transfers SET ranges = ? WHERE device = 'a'", (ranges,))
    assert list(_loaded(ChunkStore(tmp_path))) == [TWO]
    assert "unfinished uploads lost: devices send again uploads=1" in caplog.text
    assert list(_loaded(ChunkStore(tmp_path))) == [TWO]
    assert len(_files(tmp_path)) == 1


def test_index_stays_small(tmp_path: Path) -> None:
    """A transfer in thousands of pieces is one row; what it needed is used again by the next."""
    store = ChunkStore(tmp_path)
    pieces = [(2 * number, b"x") for number in range(5000)]
    for number in range(60):
        ended = [("a", bytes([number - 1]))] if number else []
        store.commit([_arrived(("a", bytes([number])), *pieces)], ended)
    with sqlite3.connect(tmp_path / "incoming.sqlite") as database:
        assert database.execute("PRAGMA page_count").fetchone()[0] < 100


@pytest.mark.parametrize("contents", [b"no database at all" * 1000, b""], ids=["noise", "empty"])
def test_damaged_index_is_replaced(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "incoming.sqlite").write_bytes(contents)
    store = ChunkStore(tmp_path)
    assert _loaded(store) == {}
    store.commit([_arrived(ONE, (0, b"one"))], [])
    assert list(_loaded(ChunkStore(tmp_path))) == [ONE]


def test_adjacent_pieces_are_written_together() -> None:
    """In order, whatever the order of arrival, and no more at once than a system call takes."""
    assert list(contiguous([])) == []
    assert list(contiguous([(6, b"c"), (0, b"ab"), (2, b"x"), (9, b"d")])) == [
        (0, [b"ab", b"x"]),
        (6, [b"c"]),
        (9, [b"d"]),
    ]
    many = contiguous([(number, b"x") for number in range(1100)])
    assert [(offset, len(buffers)) for offset, buffers in many] == [(0, 512), (512, 512), (1024, 76)]
