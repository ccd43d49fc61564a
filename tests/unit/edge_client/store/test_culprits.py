"""A job names what it runs before it does, with the images that are decoded; their record is kept small."""

from pathlib import Path

import pytest

from edge_client.store import culprit_record
from edge_client.store.culprits import Culprits
from edge_client.store.device_state import DeviceState
from edge_client.store.job_folder import At, FromJob
from protocol.errors import GraphRefused, StateError

GRAPH = b"g" * 32


@pytest.mark.parametrize("error", [GraphRefused, StateError, MemoryError, TypeError])
def test_what_is_refused_is_named_no_more_and_what_fails_otherwise_ends_the_job(
    error: type[Exception],
) -> None:
    """An error that nobody expects leaves the job, and is a death of what it ran."""
    said: list[FromJob] = []
    with pytest.raises(error), Culprits(said.append).running(GRAPH, what="it"):
        raise error
    assert said[-1] == (At(GRAPH) if error in {MemoryError, TypeError} else At())


def test_what_runs_within_something_is_named_until_it_ends() -> None:
    """The images that are decoded are named beside it; their names may be any bytes."""
    said: list[FromJob] = []
    culprits = Culprits(said.append)
    with culprits.running(GRAPH, what="it"):
        culprits.decoding(["a", "b\udcff"], 7)
        culprits.decoding([], 0)
        with culprits.running(b"inner", what="it"):
            pass
    runs = At(GRAPH)
    assert said == [runs, At(GRAPH, (b"a", b"b\xff"), 7), runs, At(b"inner"), runs, At()]


def test_the_newest_guilty_images_are_kept_with_the_memory_of_their_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends a job again is the newest again."""
    monkeypatch.setattr(culprit_record, "MAX_IMAGES", 2)
    record = DeviceState(tmp_path).culprits
    for number, image in enumerate((b"1\xff", b"2", b"1\xff", b"3")):
        record.convict(image, memory_bytes=number)
    culprits = Culprits(guilty=record.guilty())
    assert [culprits.memory_at(name) for name in ("1\udcff", "2", "3")] == [2, 0, 3]
