"""Unfinished transfers on a real disk: whole batches or nothing, over restarts, and gone once they are done."""

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from aggregator.coordination.rounds import Entry
from aggregator.ingest.chunk_files import Partials, runs_of
from aggregator.ingest.chunk_index import Incoming
from aggregator.ingest.reassembly import Arrived, Changes, Complete, Stored
from aggregator.ingest.receiver import Reception
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from protocol.errors import StateError
from protocol.wire.codec import digest_of
from protocol.wire.messages import Frame, Receipt
from protocol.wire.transfer import frames_of
from tests.support.machine import full_disk
from tests.support.submissions import TASK

ONE, TWO = ("a", digest_of(b"one")), ("b", digest_of(b"two"))
FRAME = bytes(range(256)) * 240
"""61,440 bytes."""
PAYLOAD = FRAME * 4
DIGEST = digest_of(PAYLOAD)


def _arrived(key: tuple[str, bytes], *pieces: tuple[int, bytes], seen_s: float = 1.0) -> Changes:
    return Changes([Arrived(key, 10 * len(FRAME), seen_s, pieces)], [])


def test_what_was_committed_is_there_after_a_restart(tmp_path: Path) -> None:
    """Ranges that touch are one; each transfer has its own bytes, in order, and when it was seen last."""
    incoming = Incoming(tmp_path)
    incoming.commit(_arrived(ONE, (len(FRAME), FRAME), (5, b"x")))
    incoming.commit(_arrived(TWO, (0, b"two")))
    incoming.commit(_arrived(ONE, (6, b"yz"), seen_s=2.0))
    again = Incoming(tmp_path)  # the first one is never closed, as if it had been killed
    assert again.transfers() == [
        Stored(ONE, 10 * len(FRAME), 2.0, ((5, 8), (len(FRAME), 2 * len(FRAME)))),
        Stored(TWO, 10 * len(FRAME), 1.0, ((0, 3),)),
    ]
    assert again.read(*ONE) == [(5, b"xyz"), (len(FRAME), FRAME)]


def test_what_has_ended_is_gone(tmp_path: Path) -> None:
    """And can begin anew in the same moment."""
    incoming = Incoming(tmp_path)
    incoming.commit(_arrived(ONE, (0, b"one")))
    incoming.commit(_arrived(TWO, (0, b"two")))
    incoming.commit(Changes([Arrived(ONE, 9, 3.0, [(1, b"new")])], [ONE, TWO]))
    assert incoming.transfers() == [Stored(ONE, 9, 3.0, ((1, 4),))]
    assert incoming.read(*ONE) == [(1, b"new")]


def test_a_full_disk_takes_nothing_of_a_batch(tmp_path: Path) -> None:
    """What was there before stays, and with room again the same batch is taken."""
    incoming = Incoming(tmp_path)
    incoming.commit(_arrived(ONE, (0, FRAME)))
    before = incoming.transfers()
    batch = Changes([Arrived(TWO, len(PAYLOAD), 1.0, [(0, PAYLOAD[:200_000])])], [ONE])
    with full_disk(after_bytes=150_000):
        with pytest.raises(StateError, match=r"cannot use .*incoming"):
            incoming.commit(batch)
        with pytest.raises(StateError, match=r"cannot use .*incoming"):
            incoming.try_to_write(1_000_000)
        assert incoming.transfers() == before
        assert incoming.read(*ONE) == [(0, FRAME)]
    incoming.try_to_write(1_000_000)
    incoming.commit(batch)
    assert incoming.transfers() == [Stored(TWO, len(PAYLOAD), 1.0, ((0, 200_000),))]


def _pieces(length: int) -> list[tuple[int, bytes]]:
    """Many pieces that do not touch."""
    return [(2 * number, b"x") for number in range(length)]


def test_the_file_does_not_stay_large(tmp_path: Path) -> None:
    """Once nothing is in it, what it needed goes back to the disk; what is in it stays."""
    incoming = Incoming(tmp_path)
    for number in range(60):
        incoming.commit(_arrived(("a", bytes([number])), *_pieces(5000)))
    incoming.shrink()
    assert len(incoming.transfers()) == 60
    assert _size_of(tmp_path) > 20 * len(FRAME)
    incoming.commit(Changes([], [("a", bytes([number])) for number in range(60)]))
    incoming.shrink()
    assert _size_of(tmp_path) < 2 * len(FRAME)
    assert _files(tmp_path) == []


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("incoming.sqlite*"))


def _files(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "incoming").iterdir())


def test_bytes_that_nobody_was_told_of_do_not_count(tmp_path: Path) -> None:
    """A kill after bytes are on the disk and before the table says so: they are sent again, whatever stands there."""
    incoming = Incoming(tmp_path)
    incoming.commit(_arrived(ONE, (0, b"one")))
    unsaid = [Arrived(ONE, 10 * len(FRAME), 1.0, [(3, b"???")]), Arrived(TWO, 9, 1.0, [(0, b"two")])]
    Partials(tmp_path / "incoming").write(unsaid)
    again = Incoming(tmp_path)
    assert again.transfers() == [Stored(ONE, 10 * len(FRAME), 1.0, ((0, 3),))]
    assert again.read(*ONE) == [(0, b"one")]
    assert len(_files(tmp_path)) == 1
    again.commit(_arrived(ONE, (3, b"two")))
    assert again.read(*ONE) == [(0, b"onetwo")]


@pytest.mark.parametrize("left_bytes", [0, 2, None], ids=["empty", "torn", "gone"])
def test_a_file_that_is_too_short_costs_its_transfer_and_no_other(
    tmp_path: Path, left_bytes: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """What a power cut on a disk that lies leaves of it: the device sends all of it again."""
    incoming = Incoming(tmp_path)
    incoming.commit(_arrived(ONE, (0, b"one")))
    incoming.commit(_arrived(TWO, (0, b"two")))
    (file,) = (tmp_path / "incoming").glob("a-*")
    if left_bytes is None:
        file.unlink()
    else:
        os.truncate(file, left_bytes)
    again = Incoming(tmp_path)
    assert [stored.key for stored in again.transfers()] == [TWO]
    assert "1 unfinished transfers have lost their files" in caplog.text
    assert [stored.key for stored in Incoming(tmp_path).transfers()] == [TWO]
    assert len(_files(tmp_path)) == 1


def test_a_transfer_of_which_nothing_is_known_to_be_there_is_forgotten(tmp_path: Path) -> None:
    """A table that contradicts itself costs the transfer, and not the start."""
    Incoming(tmp_path).commit(_arrived(ONE, (0, b"one")))
    with sqlite3.connect(tmp_path / "incoming.sqlite") as database:
        database.execute("DELETE FROM runs")
    assert Incoming(tmp_path).transfers() == []
    assert _files(tmp_path) == []


def test_files_of_what_has_ended_are_deleted_by_the_next_start(tmp_path: Path) -> None:
    """A kill between the table and the file leaves one, which no later transfer of the same name believes."""
    incoming = Incoming(tmp_path)
    incoming.commit(_arrived(ONE, (0, b"old bytes")))
    (file,) = (tmp_path / "incoming").iterdir()
    stale = file.read_bytes()
    incoming.commit(Changes([], [ONE]))
    assert _files(tmp_path) == []
    file.write_bytes(stale)
    incoming.commit(_arrived(ONE, (4, b"BYTES")))
    assert Incoming(tmp_path).transfers() == [Stored(ONE, 10 * len(FRAME), 1.0, ((4, 9),))]
    assert incoming.read(*ONE) == [(4, b"BYTES")]
    incoming.commit(Changes([], [ONE]))
    file.write_bytes(stale)
    assert Incoming(tmp_path).transfers() == []
    assert _files(tmp_path) == []


def test_two_devices_with_the_same_bytes_have_a_file_each(tmp_path: Path) -> None:
    """One is done, is given up or begins anew without the other."""
    reception = _reception(Store(tmp_path))
    first, *rest = _frames()
    for device in "ab":
        reception.take(device, first)
    reception.commit()
    assert len(_files(tmp_path)) == 2
    assert [reception.take("a", frame) for frame in rest][-1] == Complete(DIGEST, PAYLOAD)
    reception.commit()
    assert len(_files(tmp_path)) == 1
    assert [reception.take("b", frame) for frame in rest][-1] == Complete(DIGEST, PAYLOAD)
    reception.commit()
    assert _files(tmp_path) == []


def test_a_folder_that_is_deleted_by_hand_costs_what_was_in_it(tmp_path: Path) -> None:
    """The intake stops, and goes on with what is there, which is nothing; it makes the folder again."""
    reception = _reception(Store(tmp_path))
    reception.take("a", _frames()[0])
    reception.commit()
    shutil.rmtree(tmp_path / "incoming")
    reception.take("a", _frames()[1])
    with pytest.raises(StateError, match="cannot use") as caught:
        reception.commit()
    reception.stop(caught.value)
    assert reception._try()
    outcomes = [reception.take("a", frame) for frame in _frames()]
    assert outcomes[-1] == Complete(DIGEST, PAYLOAD)


def test_runs_are_pieces_that_follow_each_other() -> None:
    """In order, whatever the order in which they came, and no more at once than the system takes."""
    assert list(runs_of([])) == []
    assert list(runs_of([(6, b"c"), (0, b"ab"), (2, b"x"), (9, b"d")])) == [
        (0, [b"ab", b"x"]),
        (6, [b"c"]),
        (9, [b"d"]),
    ]
    many = list(runs_of([(number, b"x") for number in range(1100)]))
    assert [(offset, len(run)) for offset, run in many] == [(0, 512), (512, 512), (1024, 76)]


_TAKING = """\
import sys
from pathlib import Path
from aggregator.ingest.receiver import Reception
from aggregator.storage.store import Store
from tests.unit.aggregator.ingest.test_chunk_index import _long_frames
reception = Reception(Store(Path(sys.argv[1])), max_bytes=10**8, unfinished_s=3600.0)
for number, frame in enumerate(_long_frames()):
    reception.take("a", frame)
    if number % 3 == 2:
        reception.commit()
        print(frame.offset + len(frame.data), flush=True)
"""


def _long_frames() -> list[Frame]:
    payload = np.random.default_rng(0).bytes(20_000_000)
    return list(frames_of(payload, digest=digest_of(payload), chunk_bytes=50_000))


def test_what_was_told_to_be_there_is_there_after_sigkill(tmp_path: Path) -> None:
    """At whatever moment: all that was told, and of the rest only what is right."""
    frames = _long_frames()
    payload = b"".join(frame.data for frame in frames)
    for kill in range(4):
        folder = tmp_path / str(kill)
        folder.mkdir()
        with subprocess.Popen([sys.executable, "-c", _TAKING, folder], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            told = [int(process.stdout.readline()) for _ in range(7 * kill + 1)]
            time.sleep(0.003 * kill)
            process.kill()
            told += [int(line) for line in process.stdout]
        incoming = Incoming(folder)
        ((start, stop),) = incoming.transfers()[0].ranges
        assert start == 0
        assert told[-1] <= stop < len(payload)
        assert incoming.read("a", digest_of(payload)) == [(0, payload[:stop])]


@pytest.mark.parametrize("contents", [b"no database at all" * 1000, b""], ids=["noise", "empty"])
def test_a_file_that_is_broken_is_begun_anew(tmp_path: Path, contents: bytes) -> None:
    """Devices send again what was in it."""
    (tmp_path / "incoming.sqlite").write_bytes(contents)
    incoming = Incoming(tmp_path)
    assert incoming.transfers() == []
    incoming.commit(_arrived(ONE, (0, b"one")))
    assert len(Incoming(tmp_path).transfers()) == 1


def _reception(store: Store) -> Reception:
    return Reception(store, max_bytes=10**6, unfinished_s=3600.0)


def _frames() -> list[Frame]:
    return list(frames_of(PAYLOAD, digest=DIGEST))


def test_a_transfer_goes_on_after_a_restart(tmp_path: Path) -> None:
    """What was committed is not asked for again, what was not is; the whole is what was sent."""
    store = Store(tmp_path)
    first = _reception(store)
    frames = _frames()
    first.take("a", frames[0])
    first.commit()
    first.take("a", frames[1])
    second = _reception(store)
    assert second.take("a", frames[3]) == Receipt(
        digest=DIGEST, status="missing", missing=((len(FRAME), 3 * len(FRAME)),)
    )
    second.commit()
    second.take("a", frames[2])
    assert second.take("a", frames[1]) == Complete(DIGEST, PAYLOAD)
    second.commit()
    assert Incoming(tmp_path).transfers() == []


def test_what_was_stored_meanwhile_leaves_nothing_behind(tmp_path: Path) -> None:
    """A kill between storing a submission and clearing its frames: the next start clears them."""
    store = Store(tmp_path)
    reception = _reception(store)
    reception.take("a", _frames()[0])
    reception.commit()
    store.submissions.put(TASK, SubmissionRecord("a", Entry(1, DIGEST, 0.0), len(PAYLOAD), 1, 1, {0: 1}))
    _reception(store)
    assert Incoming(tmp_path).transfers() == []


def test_what_does_not_go_on_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By its age, on the disk as well; and the room goes back."""
    Incoming(tmp_path).commit(_arrived(ONE, *((number * len(FRAME), FRAME) for number in range(10))))
    reception = _reception(Store(tmp_path))
    with caplog.at_level("INFO"):
        reception.tick()
    assert "given up: transfer" in caplog.text
    assert Incoming(tmp_path).transfers() == []


def test_a_stopped_intake_answers_the_last_frame_only(tmp_path: Path) -> None:
    """One answer for each time a device asks; nothing is taken meanwhile."""
    reception = _reception(Store(tmp_path))
    reception.stop(StateError("the disk is full"))
    assert [reception.take("a", frame) for frame in _frames()[:3]] == [None] * 3
    answer = reception.take("a", _frames()[3])
    assert isinstance(answer, Receipt)
    assert (answer.status, answer.reason) == ("refused", "no_space")
    reception.commit()
    assert Incoming(tmp_path).transfers() == []
