"""Uploads: short queries, and missing ranges in windows that end with a query."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.core import events, uploads
from edge_client.core.frame_size import MIN_BYTES, WINDOWS_TO_DOUBLE, FrameSize
from edge_client.core.state import MAX_DAMAGED, SLOW_LINK, Mode, State, Upload, UploadItem
from edge_client.core.state_machine import step
from edge_client.core.uploads import QUERY_BYTES
from protocol.mqtt import events as mqtt
from protocol.retry_delay import MAX_DELAY_S
from protocol.wire.messages import MAX_CHUNK_BYTES, Reason, Receipt
from protocol.wire.transfer import ENVELOPE_BYTES, Ranges
from tests.support.simulation.fleet import item_of

SIZE = 40 * MAX_CHUNK_BYTES + 5
ITEM = item_of(bytes(SIZE))
QUERY = (SIZE - QUERY_BYTES, SIZE)


def begin(item: UploadItem = ITEM, mode: Mode = Mode.SERVICE) -> State:
    """Return a connected device that has sent the query of its only upload."""
    state = State(mode=mode, has_record=True, task=item.task, uploads=(Upload(item),))
    return step(state, mqtt.Connected(), now_s=0)[0]


def play(state: State, event: events.Event, *, now_s: float = 1.0) -> tuple[State, list[Ranges]]:
    """Return the state after an event, and the windows sent."""
    state, actions = step(state, event, now_s=now_s)
    return state, [action.ranges for action in actions if isinstance(action, events.SendFrames)]


def answer(state: State, missing: Ranges, *, now_s: float = 1.0) -> tuple[State, list[Ranges]]:
    """Report missing ranges."""
    return play(state, Receipt(digest=ITEM.digest, status="missing", missing=missing), now_s=now_s)


def drain(state: State, *, now_s: float = 1.0) -> tuple[State, list[Ranges]]:
    """Let the broker acknowledge everything."""
    return play(state, mqtt.Drained(), now_s=now_s)


def tick(state: State, *, now_s: float = MAX_DELAY_S) -> tuple[State, list[Ranges]]:
    return play(state, events.Ticked(), now_s=now_s)


@given(
    bounds=st.lists(st.integers(0, SIZE), max_size=40, unique=True),
    chunk_bytes=st.integers(256, MAX_CHUNK_BYTES),
    frames=st.integers(1, 9),
)
def test_windows_cover_their_ranges(bounds: list[int], chunk_bytes: int, frames: int) -> None:
    """No byte is omitted or duplicated, and no frame or window is too large."""
    ordered = sorted(bounds)
    rest: Ranges = tuple(zip(ordered[::2], ordered[1::2], strict=False))
    whole = sum(stop - start for start, stop in rest)
    frames_cut: list[tuple[int, int]] = []
    last = 0
    while rest:
        window, rest = uploads.cut_window(rest, chunk_bytes=chunk_bytes, frames=frames)
        assert 1 <= len(window) <= frames
        frames_cut.extend(window)
    for start, stop in frames_cut:
        assert last <= start < stop <= start + chunk_bytes
        last = stop
    assert sum(stop - start for start, stop in frames_cut) == whole


@pytest.mark.parametrize("missing", [(), ((SIZE, SIZE + 9),), ((9, 9),), ((9, 4),)])
def test_an_answer_without_ranges_is_ignored(missing: Ranges) -> None:
    """The next query is sent when it is due."""
    state, windows = answer(begin(), missing)
    assert windows == []
    state, _ = drain(state)
    assert tick(state)[1] == [(QUERY,)]


def test_frames_fit_the_brokers_packet_limit() -> None:
    """Each connection has its own; a payload of one frame is its own query."""
    state, _ = play(begin(), mqtt.Connected(10_000 + ENVELOPE_BYTES))
    _, (window,) = answer(state, ((0, SIZE),))
    assert {stop - start for start, stop in window} == {10_000}
    assert play(begin(item_of(b"small")), mqtt.Connected())[1] == [((0, 5),)]


@pytest.mark.parametrize("carries_bytes", [70_000, 20_000, 6_000])
def test_frames_shrink_until_they_arrive_before_the_connection_ends(carries_bytes: int) -> None:
    """Down to 4 KiB, and the device reports it until the upload has ended."""
    state, done = begin(), SIZE - 200_000
    for _ in range(70):
        state, (window,) = answer(state, ((done, SIZE),))
        begun = done
        done = max(stop for _, stop in ((done, done), *window) if stop <= begun + carries_bytes)
        if done == SIZE:
            break
        state, _ = play(state, mqtt.Disconnected("lost", 1.0))
        state, _ = play(state, mqtt.Connected())
    assert done == SIZE
    assert state.link_problem == SLOW_LINK
    state, _ = play(state, Receipt(digest=ITEM.digest, status="received"))
    assert state.link_problem == ""


@pytest.mark.parametrize(("size", "limit_bytes"), [(SIZE, 20_000), (SIZE, 5_000), (30_000, 20_000)])
def test_frames_shrink_until_the_broker_does_not_drop_them(size: int, limit_bytes: int) -> None:
    """It acknowledges them all. A payload of one frame that gets no answer is queried by its last bytes."""
    item, arrived = item_of(bytes(size)), bytearray(size)
    state = State(mode=Mode.SERVICE, has_record=True, task=item.task, uploads=(Upload(item),))
    state, sent = play(state, mqtt.Connected())
    for now_s in range(0, 24 * 3600, 5):
        frames, sent = (
            [frame for window in sent for frame in window if frame[1] - frame[0] <= limit_bytes],
            [],
        )
        happened: list[events.Event] = [mqtt.Drained()]
        for start, stop in frames:
            arrived[start:stop] = b"x" * (stop - start)
            if stop == size and 0 in arrived:
                missing = ((arrived.index(0), arrived.rindex(0) + 1),)
                happened.append(Receipt(digest=item.digest, status="missing", missing=missing))
        for event in (*happened, events.Ticked()):
            state, windows = play(state, event, now_s=now_s)
            sent += windows
        if 0 not in arrived:
            break
    assert 0 not in arrived


def test_a_repeated_answer_does_not_make_frames_smaller() -> None:
    """A busy aggregator answers two queries one right after the other: nothing was dropped in between."""
    state, _ = tick(drain(begin())[0])
    missing = ((0, 2 * MAX_CHUNK_BYTES),)
    state, windows = answer(state, missing)
    assert len(windows) == 1
    state, _ = answer(drain(state)[0], missing)
    assert state.upload_frames.ceiling_bytes == MAX_CHUNK_BYTES


def test_only_a_connection_that_carried_frames_counts_as_lost() -> None:
    """One alone is no reason, and neither are attempts to connect again; queries that arrive prove nothing."""
    state, _ = answer(begin(), ((0, SIZE),))
    for _ in range(5):
        state, _ = play(state, mqtt.Disconnected("lost", 1.0))
    assert state.chunk_bytes == MAX_CHUNK_BYTES
    state, _ = play(state, mqtt.Connected())
    state, _ = drain(state)
    state, _ = answer(state, ((0, SIZE),))
    state, _ = play(state, mqtt.Disconnected("lost", 1.0))
    assert state.chunk_bytes == MAX_CHUNK_BYTES // 2


def test_answers_to_two_queries_do_not_shrink_frames() -> None:
    """A device queries at its connection, and again as it learns that the aggregator has started."""
    size = 3 * MAX_CHUNK_BYTES
    item = item_of(bytes(size))
    missing = Receipt(digest=item.digest, status="missing", missing=((0, size - QUERY_BYTES),))
    state, _ = drain(begin(item))
    state, windows = play(state, events.AggregatorStarted())
    assert windows == [((size - QUERY_BYTES, size),)]
    for event in (mqtt.Drained(), missing, missing, mqtt.Drained()):
        state, _ = play(state, event)
    assert state.chunk_bytes == MAX_CHUNK_BYTES
    state, _ = tick(state)
    state, _ = play(state, Receipt(digest=item.digest, status="received"))
    assert (state.uploads, state.link_problem) == ((), "")


def test_frames_grow_again() -> None:
    """After 16 windows that arrived; a failure in between begins anew."""
    small = FrameSize(MIN_BYTES)
    for _ in range(WINDOWS_TO_DOUBLE - 1):
        small = small.arrived()
    assert small.limit_bytes == small.failed().arrived().limit_bytes == MIN_BYTES
    assert small.arrived().limit_bytes == 2 * MIN_BYTES
    size = FrameSize(MIN_BYTES).failed().failed()
    assert size.limit_bytes == MIN_BYTES
    for _ in range(10 * WINDOWS_TO_DOUBLE):
        size = size.arrived()
    assert size.limit_bytes == MAX_CHUNK_BYTES


def test_lost_frames_back_off() -> None:
    """This holds if queries arrive and frames do not."""
    state, asked, whole = begin(), True, 0
    for second in range(3000):
        for _ in range(3):  # queries are answered at once, and again at once
            if not asked:
                break
            state, windows = answer(state, ((0, QUERY[0]),), now_s=second)
            asked = bool(windows)
            whole += asked
            while windows:
                state, windows = drain(state, now_s=second)
        state, windows = tick(state, now_s=second)
        asked = asked or bool(windows)
    assert 3 < whole < 30


def test_progress_resets_the_retry_delay() -> None:
    """The same missing ranges are no progress."""
    state = begin()
    attempts = []
    for missing in (((0, 900),), ((0, 900),), ((0, 900),), ((0, 800),)):
        state, _ = answer(state, missing)
        attempts.append(state.uploads[0].attempts)
        while state.uploads[0].due_s is None:
            state, _ = drain(state)
        state, _ = tick(state)
    assert attempts[1] < attempts[2]
    assert attempts[3] == 0


@pytest.mark.parametrize(
    ("mode", "reason", "problem"),
    [
        (Mode.SERVICE, "no_space", "no space"),
        (Mode.ONCE, "no_space", "no space"),
        (Mode.SERVICE, "digest", "arrives damaged"),
        (Mode.ONCE, "digest", ""),
    ],
)
def test_refusals_that_may_pass_do_not_end_an_upload(mode: Mode, reason: Reason, problem: str) -> None:
    """No space and a wrong digest, which is not authenticated: it is repeated, with delays, and logged once.

    Bytes that always arrive damaged end a single run.
    """
    refusal = Receipt(digest=ITEM.digest, status="refused", reason=reason)
    actions: list[events.Action] = []
    state, asked = begin(mode=mode), 0
    for second in range(1, 4000):
        if state.uploads and state.uploads[0].due_s is None:
            state, more = step(state, refusal, now_s=second)
            actions.extend(more)
        state, windows = tick(state, now_s=second)
        asked += len(windows)
    assert [type(action) for action in actions].count(events.Exit) == (not problem)
    if not problem:
        return
    logged = [action for action in actions if isinstance(action, events.Log) and action.error]
    assert logged == [events.Log(f"{state.upload_problem}; retrying", error=True)]
    assert problem in state.upload_problem
    assert 5 < asked < 25
    state, received = step(state, Receipt(digest=ITEM.digest, status="received"), now_s=4000)
    assert received[0] == events.StoreReceipt(ITEM)
    assert (state.uploads, state.upload_problem) == ((), "")


@pytest.mark.parametrize("reason", ["malformed", "superseded", "unknown_task"])
def test_a_forged_refusal_keeps_an_upload_out_no_longer_than_the_attack(reason: Reason) -> None:
    """It is queried again, after five minutes at most, behind other uploads, and is reported until it is received."""
    forged = Receipt(digest=ITEM.digest, status="refused", reason=reason, sequence=2**60)
    actions: list[events.Action] = []
    state = begin()
    for second in range(1, 4000):
        for _ in range(2):  # only the first answer to a query counts
            state, more = step(state, forged, now_s=second)
            actions.extend(more)
    assert reason in state.upload_problem
    assert 10 < len([action for action in actions if isinstance(action, events.SendFrames)]) < 25
    assert len([action for action in actions if isinstance(action, events.Log)]) <= MAX_DAMAGED
    state = uploads.start(state, REPORT)
    assert tick(state, now_s=4000)[1] == [((0, REPORT.size_bytes),)]  # before the refused one
    state, windows = play(state, Receipt(digest=REPORT.digest, status="received"), now_s=4001)
    assert windows == [(QUERY,)]
    assert reason in state.upload_problem
    state, _ = step(state, Receipt(digest=ITEM.digest, status="received"), now_s=4500)
    assert (state.uploads, state.upload_problem) == ((), "")


def test_an_upload_refused_by_the_broker_is_kept_and_retried() -> None:
    """It is logged once."""
    state, actions = step(begin(), mqtt.Unsendable("up", "not authorized"), now_s=1)
    assert [type(action) for action in actions] == [events.Log]
    assert "not authorized" in state.upload_problem
    state, actions = step(state, mqtt.Unsendable("up", "not authorized"), now_s=1)
    assert actions == ()
    state, windows = drain(state)
    assert windows == []
    assert tick(state)[1] == [(QUERY,)]


def test_a_lost_submission_is_sent_again() -> None:
    """The aggregator reports a received one missing; receipts that change no status have no effect."""
    state, _ = play(begin(), Receipt(digest=ITEM.digest, status="received"))
    assert play(state, Receipt(digest=b"o" * 32, status="missing"))[1] == []
    for receipt in ("received", "refused"):
        assert play(state, Receipt(digest=ITEM.digest, status=receipt, reason="malformed"))[1] == []
    state, windows = play(state, Receipt(digest=ITEM.digest, status="missing"))
    assert windows == [(QUERY,)]
    assert play(state, Receipt(digest=ITEM.digest, status="missing"))[1] == []
    state, windows = play(state, Receipt(digest=ITEM.digest, status="missing", missing=((0, 6),)))
    assert windows == [((0, 6), QUERY)]


def test_a_received_submission_is_confirmed_with_a_query_only() -> None:
    """All devices do so when an aggregator starts, also those whose submission fits one frame."""
    item = item_of(bytes(1000))
    state, windows = play(
        State(mode=Mode.SERVICE, has_record=True, task=item.task, uploads=(Upload(item),)), mqtt.Connected()
    )
    assert windows == [((0, 1000),)]
    state, _ = play(state, Receipt(digest=item.digest, status="received"))
    state, windows = play(state, events.AggregatorStarted())
    assert windows == [((1000 - QUERY_BYTES, 1000),)]
    state, windows = play(state, Receipt(digest=item.digest, status="missing", missing=((0, 1000),)))
    assert windows == [((0, 1000),)]


REPORT = item_of(b"report", kind="evaluation", about="aa")


@pytest.mark.parametrize(
    "event",
    [events.OutboxSeen((ITEM, REPORT)), events.SubmissionBuilt(ITEM.task, ITEM)],
    ids=["stored", "built"],
)
def test_a_displaced_upload_restarts_after_the_other(event: events.Event) -> None:
    """Acknowledgements that arrive before that belong to the other one."""
    state, windows = play(begin(REPORT), event)
    assert windows == [(QUERY,)]
    state, _ = drain(state)
    assert play(state, Receipt(digest=ITEM.digest, status="received"))[1] == [((0, 6),)]
