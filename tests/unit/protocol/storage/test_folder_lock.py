"""A folder is locked by one program until that ends."""

import errno
import fcntl
import os
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


def test_lock_ends_with_a_killed_process(tmp_path: Path) -> None:
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


def test_missing_folder_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert not FolderLock(missing).is_taken()
    with pytest.raises(StateError, match="missing"):
        FolderLock(missing).take()
    assert not missing.exists()


def test_a_filesystem_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StateError, match=r"cannot use .*lock: No locks available"):
        FolderLock(tmp_path).take()
