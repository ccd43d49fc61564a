"""A folder belongs to one program, for as long as that lives and no longer."""

import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import StateError
from protocol.storage.folder_lock import FolderLock

_HOLD = """
import sys
from pathlib import Path
from protocol.storage.folder_lock import FolderLock

lock = FolderLock(Path(sys.argv[1]))
assert lock.take()
print("taken", flush=True)
input()
"""


def test_a_folder_is_free_again_when_its_program_was_killed(tmp_path: Path) -> None:
    """A second program does not get it, and does after the first was killed without a chance to tidy up."""
    lock = FolderLock(tmp_path)
    assert not lock.is_taken()
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"taken\n"
        assert lock.is_taken()
        assert not lock.take()
        holder.kill()
    assert not lock.is_taken()
    assert lock.take()
    assert lock.is_taken()
    lock.release()
    assert not lock.is_taken()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """It is told with its path; to look at it changes nothing."""
    missing = tmp_path / "missing"
    assert not FolderLock(missing).is_taken()
    with pytest.raises(StateError, match="missing"):
        FolderLock(missing).take()
    assert not missing.exists()
