"""What ends jobs: named before it runs, counted by the service, and not run again after three deaths in a row."""

from pathlib import Path

import pytest

from edge_client.storage import culprit_record
from edge_client.storage.culprits import MAX_DEATHS, Culprits
from edge_client.storage.device_state import DeviceState
from edge_client.storage.job_folder import At, FromJob, Worked
from protocol.errors import CrashedBefore, GraphRefused, Interrupted, StateError

GRAPH = b"g" * 32


class EndedError(Exception):
    """Stands for the end of a job: nothing handles it."""


class Job:
    """A job with the deaths that are stored, whose messages the service has received."""

    def __init__(self, state: DeviceState, **values: object) -> None:
        self._state = state
        self.at = At()
        self.culprits = Culprits(self._receive, deaths=state.culprits.deaths(), **values)  # type: ignore[arg-type]

    def _receive(self, message: FromJob) -> None:
        if isinstance(message, At):
            self.at = message
        elif isinstance(message, Worked):
            self._state.culprits.forget(message.what)


@pytest.fixture
def state(tmp_path: Path) -> DeviceState:
    return DeviceState(tmp_path)


def end(state: DeviceState, digest: bytes = GRAPH, *, stores: bool = False) -> None:
    """Let a job end while it runs something, perhaps after results were stored."""
    job = Job(state)

    def run() -> None:
        with job.culprits.running(digest, what="it"):
            if stores:
                job.culprits.stored()
            raise EndedError

    with pytest.raises(EndedError):
        run()
    assert job.at.what == digest
    state.culprits.add_death(job.at.what)


def deaths(state: DeviceState, digest: bytes = GRAPH) -> int:
    return state.culprits.deaths().get(digest.hex(), 0)


def test_what_ended_three_jobs_is_not_run_again(tmp_path: Path, state: DeviceState) -> None:
    """Across restarts; something else runs, and the operator can insist."""
    for _ in range(MAX_DEATHS):
        end(DeviceState(tmp_path))
    job = Job(DeviceState(tmp_path))
    with (
        pytest.raises(CrashedBefore, match="ended 3 times while it ran it"),
        job.culprits.running(GRAPH, what="it"),
    ):
        pytest.fail("it ran")
    assert job.at == At()
    with job.culprits.running(b"other", what="it"):
        assert job.at == At(b"other")
    with job.culprits.running(GRAPH, what="it", max_deaths=None):
        pass
    assert job.at == At()
    assert deaths(state) == 0


@pytest.mark.parametrize("end_of_run", [None, GraphRefused, StateError, Interrupted])
def test_a_run_that_works_resets_the_count(state: DeviceState, end_of_run: type[Exception] | None) -> None:
    """One that is refused or stopped does not count, nor is it named any more, and earlier deaths stay."""
    end(state)
    job = Job(state)
    try:
        with job.culprits.running(GRAPH, what="it"):
            if end_of_run is not None:
                raise end_of_run
    except (GraphRefused, StateError, Interrupted):
        pass
    assert deaths(state) == (1 if end_of_run else 0)
    assert job.at == At()


def test_deaths_after_results_were_stored_are_counted_anew(state: DeviceState) -> None:
    """Features and checkpoints that are on disk are not computed again: the next death is at another place."""
    for _ in range(2 * MAX_DEATHS):
        end(state, stores=True)
    assert deaths(state) == 1


def test_a_run_within_another_one_is_named_until_it_ends(state: DeviceState) -> None:
    """The images that are decoded are named beside what runs."""
    job = Job(state)
    with job.culprits.running(GRAPH, what="it"):
        job.culprits.decoding(["a", "b\udcff"], 7)
        assert job.at == At(GRAPH, (b"a", b"b\xff"), 7)
        job.culprits.decoding([], 0)
        with job.culprits.running(b"inner", what="it"):
            assert job.at == At(b"inner")
        assert job.at == At(GRAPH)


def test_only_the_newest_culprits_are_kept(state: DeviceState, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet's tasks and heads, and files, change for years; one that ends a job again is new again."""
    monkeypatch.setattr(culprit_record, "MAX_ROWS", 2)
    monkeypatch.setattr(culprit_record, "MAX_IMAGES", 2)
    for digest in (b"a", b"b", b"a", b"c"):
        state.culprits.add_death(digest)
    for number, image in enumerate((b"1", b"2", b"1", b"3")):
        state.culprits.convict(image, memory_bytes=number)
    assert state.culprits.deaths() == {b"a".hex(): 2, b"c".hex(): 1}
    assert state.culprits.guilty() == {b"1": 2, b"3": 3}


def test_a_guilty_image_has_the_memory_of_its_job(state: DeviceState) -> None:
    """Its name may be any bytes."""
    state.culprits.convict(b"b\xff", memory_bytes=10**9)
    culprits = Culprits(guilty=state.culprits.guilty())
    assert [culprits.memory_at(name) for name in ("b\udcff", "other")] == [10**9, 0]
