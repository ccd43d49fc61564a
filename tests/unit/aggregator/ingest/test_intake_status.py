"""What is told of a stopped intake, on a disk that takes nothing more."""

import os
from pathlib import Path

import pytest

from aggregator.ingest import intake_status
from aggregator.ingest.intake_status import Stopped
from protocol.errors import StateError
from tests.support.machine import full_disk


def test_it_is_told_on_a_full_disk(tmp_path: Path) -> None:
    """The file never changes its size, whatever the reason is made of."""
    intake_status.create(tmp_path)
    assert intake_status.read(tmp_path) is None
    (file,) = tmp_path.iterdir()
    size_bytes = file.stat().st_size
    stopped = Stopped(12.5, "Kein Platz: \x00\u2026" * 100)
    with full_disk(after_bytes=size_bytes):
        intake_status.write(tmp_path, stopped)
        told = intake_status.read(tmp_path)
        assert told is not None
        assert told.since_s == 12.5
        assert stopped.reason.startswith(told.reason)
        assert len(told.reason) > 100
        intake_status.write(tmp_path, None)
    assert intake_status.read(tmp_path) is None
    assert file.stat().st_size == size_bytes


@pytest.mark.parametrize("contents", [b"", b"noise", b'{"since_s": 1}', os.urandom(1000)])
def test_a_notice_that_cannot_be_read_is_none(tmp_path: Path, contents: bytes) -> None:
    """Also where there is no file at all: before the first start."""
    assert intake_status.read(tmp_path) is None
    intake_status.create(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(contents)
    assert intake_status.read(tmp_path) is None


def test_a_file_that_was_deleted_is_a_clear_error(tmp_path: Path) -> None:
    """It is not made again: on a full disk that might leave half a file."""
    with pytest.raises(StateError, match=r"intake\.json: No such file"):
        intake_status.write(tmp_path, None)
