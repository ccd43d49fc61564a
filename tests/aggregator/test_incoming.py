"""Unfinished transfers on a real disk: whole batches or nothing, over restarts, and gone once they are done."""

from pathlib import Path

import pytest

from aggregator.incoming import Incoming
from aggregator.reception import Reception
from aggregator.rounds import Entry
from aggregator.store import Store, SubmissionRow
from aggregator.uplink import Arrived, Changes, Complete, Stored
from protocol.codec import digest_of
from protocol.errors import StateError
from protocol.messages import Frame, Receipt
from protocol.transfer import frames_of
from tests.aggregator.made import TASK
from tests.machine import full_disk

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
    assert again.read(*ONE) == [(5, b"x"), (6, b"yz"), (len(FRAME), FRAME)]


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
    with full_disk(after_bytes=300_000):
        with pytest.raises(StateError, match=r"cannot use .*incoming\.sqlite"):
            incoming.commit(batch)
        with pytest.raises(StateError, match=r"cannot use .*incoming\.sqlite"):
            incoming.try_to_write(1_000_000)
        assert incoming.transfers() == before
        assert incoming.read(*ONE) == [(0, FRAME)]
    incoming.try_to_write(1_000_000)
    incoming.commit(batch)
    assert incoming.transfers() == [Stored(TWO, len(PAYLOAD), 1.0, ((0, 200_000),))]


def test_the_file_does_not_stay_large(tmp_path: Path) -> None:
    """Once nothing is in it, what it needed goes back to the disk; what is in it stays."""
    incoming = Incoming(tmp_path)
    for number in range(60):
        incoming.commit(_arrived(("a", bytes([number])), (0, FRAME)))
    incoming.shrink()
    assert len(incoming.transfers()) == 60
    incoming.commit(Changes([], [("a", bytes([number])) for number in range(60)]))
    incoming.shrink()
    assert sum(file.stat().st_size for file in tmp_path.glob("incoming.sqlite*")) < 10 * len(FRAME)


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
    store.keep_submission(TASK, SubmissionRow("a", Entry(1, DIGEST, 0.0), len(PAYLOAD), 1, 1, {0: 1}))
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
