"""Counts of the program's ends while it ran a task's graphs or a head."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_client.storage.crash_counter import MAX_CRASHES, MAX_ROWS
from edge_client.storage.device_state import DeviceState
from edge_client.storage.disk_space import DiskAlmostFull
from edge_client.storage.stored_values import HeadProblem, Heads, InstalledHead
from protocol.errors import CrashedBefore, GraphRefused, Interrupted, StateError

GRAPH = b"g" * 32


class EndedError(Exception):
    """Stands for the end of the program: nothing handles it."""


@pytest.fixture
def state(tmp_path: Path) -> DeviceState:
    return DeviceState(tmp_path)


def end(state: DeviceState, digest: bytes = GRAPH, *, progress: bool = False) -> None:
    def run() -> None:
        with state.crash_counter.guard(digest, what="it") as on_progress:
            if progress:
                on_progress()
            raise EndedError

    with pytest.raises(EndedError):
        run()


def test_what_ended_the_program_three_times_is_not_run_again(tmp_path: Path, state: DeviceState) -> None:
    """Across restarts; something else runs, and the operator can insist."""
    for _ in range(MAX_CRASHES):
        end(DeviceState(tmp_path))
    for _ in range(2):
        with (
            pytest.raises(CrashedBefore, match="ended 3 times while it ran it"),
            DeviceState(tmp_path).crash_counter.guard(GRAPH, what="it"),
        ):
            pytest.fail("it ran")
    with state.crash_counter.guard(b"other", what="it"):
        assert state.crash_counter.crashes(b"other") == 0
    with state.crash_counter.guard(GRAPH, what="it", max_crashes=None):
        pass
    assert state.crash_counter.crashes(GRAPH) == 0


@pytest.mark.parametrize("end_of_run", [None, GraphRefused, StateError, Interrupted, KeyboardInterrupt])
def test_a_run_that_works_resets_the_count(
    state: DeviceState, end_of_run: type[BaseException] | None
) -> None:
    """One that is refused or stopped does not count, and earlier ends stay."""
    end(state)
    with state.crash_counter.guard(GRAPH, what="it", is_part=True):
        pass
    assert state.crash_counter.crashes(GRAPH) == 1
    try:
        with state.crash_counter.guard(GRAPH, what="it"):
            if end_of_run is not None:
                raise end_of_run
    except (GraphRefused, StateError, Interrupted, KeyboardInterrupt):
        pass
    assert state.crash_counter.crashes(GRAPH) == (1 if end_of_run else 0)


def test_ends_after_progress_are_counted_anew(state: DeviceState) -> None:
    """Features and checkpoints that are on disk are not computed again: the next end is at another place."""
    for _ in range(2 * MAX_CRASHES):
        end(state, progress=True)
    assert state.crash_counter.crashes(GRAPH) == 1


def test_a_run_during_an_orderly_end_does_not_count(state: DeviceState) -> None:
    """The operator stops the program while a slow graph runs."""
    running = state.crash_counter.guard(GRAPH, what="it")
    running.__enter__()
    state.crash_counter.stop()
    assert DeviceState(state.folder).crash_counter.crashes(GRAPH) == 0


def test_the_number_of_counts_is_bounded(state: DeviceState) -> None:
    """Each task and head that ended the program leaves one; the oldest are forgotten."""
    for number in range(MAX_ROWS + 3):
        end(state, b"%d" % number)
    assert [state.crash_counter.crashes(b"%d" % number) for number in (0, 2, 3, MAX_ROWS + 2)] == [0, 0, 1, 1]


def head(version: int) -> InstalledHead:
    return InstalledHead(head=bytes([version]) * 32, version=version, backbones=(), classes=())


def test_a_head_that_fails_three_times_in_use_gives_way_to_the_previous_one(state: DeviceState) -> None:
    """By its own refusals too, and only if nothing works in between; one of two programs at a time counts."""

    def fail(*, beside_another: bool) -> None:
        with state.run_head(head(2)):
            if beside_another:
                with DeviceState(state.folder).run_head(head(2)):
                    pass
            raise GraphRefused

    state.set(Heads(head(2), head(1)))
    for number in range(MAX_CRASHES + 1):
        with state.run_head(head(2), is_part=True):
            pass
        with pytest.raises(GraphRefused):
            fail(beside_another=number == 1)
        if number == 0:
            with state.run_head(head(2)):
                pass
    assert DeviceState(state.folder, read_only=True).heads_in_use() == Heads(head(2), head(1))
    assert state.heads_in_use() == state.get(Heads) == Heads(head(1))
    assert state.get(HeadProblem).text == "head 2 failed 3 times in use"


def test_nothing_is_counted_on_an_almost_full_disk(
    state: DeviceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be room for a count, and then none for its deletion: three builds or predictions would be the last."""
    disk = SimpleNamespace(total=3 * 1024**2, free=44 * 1024)
    monkeypatch.setattr("edge_client.storage.disk_space.disk_usage", lambda _: disk)
    with pytest.raises(DiskAlmostFull):
        end(state)
    with pytest.raises(EndedError), state.run_head(head(2)):
        raise EndedError
    assert [DeviceState(state.folder).crash_counter.crashes(key) for key in (GRAPH, head(2).key)] == [0, 0]
