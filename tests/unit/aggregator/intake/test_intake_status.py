"""The status of a stopped intake, on a full disk."""

import os
from pathlib import Path

import pytest

from aggregator.intake import intake_status
from aggregator.intake.intake_status import IntakeStatus
from protocol.errors import StateError
from tests.support.machine_faults import full_disk


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
