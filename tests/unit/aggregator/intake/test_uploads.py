"""Intake of uploads on a real disk: durable before acknowledged, over restarts, stops, and kills; and its status."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from aggregator.coordination.round_state import Entry
from aggregator.intake import intake_status
from aggregator.intake import uploads as intake
from aggregator.intake.chunk_store import ChunkStore
from aggregator.intake.intake_status import IntakeStatus
from aggregator.intake.reassembly import Complete
from aggregator.intake.uploads import Uploads
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from protocol.errors import StateError
from protocol.wire.codec import digest_of
from protocol.wire.messages import Frame, Receipt
from protocol.wire.transfer import frames_of
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


def test_same_payload_of_two_devices_is_two_uploads(store: Store) -> None:
    uploads = _uploads(store)
    first, *rest = FRAMES
    for device in "ab":
        uploads.take(device, first)
    uploads.commit()
    for left, device in ((1, "a"), (0, "b")):
        assert [uploads.take(device, frame) for frame in rest][-1] == COMPLETE
        uploads.commit()
        assert _stored(store) == left


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


_RECEIVING = """\
import sys
from pathlib import Path
from aggregator.intake.uploads import Uploads
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from tests.unit.aggregator.intake.test_uploads import long_frames
uploads = Uploads(open_store(Path(sys.argv[1])), max_bytes=10**8, unfinished_s=3600.0)
for number, frame in enumerate(long_frames()):
    uploads.take("a", frame)
    if number % 3 == 2:
        uploads.commit()
        print(frame.offset + len(frame.data), flush=True)
"""


def long_frames() -> list[Frame]:
    payload = np.random.default_rng(0).bytes(20_000_000)
    return list(frames_of(payload, digest=digest_of(payload), chunk_bytes=50_000))


@pytest.mark.parametrize("commits", [1, 8, 15, 22])
def test_acknowledged_bytes_survive_sigkill(tmp_path: Path, commits: int) -> None:
    """At whatever moment: all that was committed, and of the rest only correct bytes."""
    payload = b"".join(frame.data for frame in long_frames())
    with subprocess.Popen([sys.executable, "-c", _RECEIVING, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        committed = [int(process.stdout.readline()) for _ in range(commits)]
        process.kill()
        committed += [int(line) for line in process.stdout]
    chunks = ChunkStore(tmp_path)
    (transfer,) = chunks.load()
    ((start, stop),) = transfer.stored
    assert start == 0
    assert committed[-1] <= stop < len(payload)
    assert chunks.read(transfer.key, transfer.stored) == [(0, payload[:stop])]


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
