"""Batches of files that are written in the background: all of them appear, or none."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from aggregator.storage.background import WriteBatch, submit
from aggregator.storage.blobs import FolderBlobs
from protocol.errors import StateError
from protocol.wire.codec import digest_of
from tests.support.machine_faults import full_disk

DATA = bytes(range(256)) * 1000
DIGEST = digest_of(DATA)


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_batch_renames_all_files_at_once(tmp_path: Path) -> None:
    store, together = FolderBlobs(tmp_path), WriteBatch()
    payloads = [bytes([number]) * 1000 for number in range(20)]
    store.path(store.put(payloads[0])).write_bytes(b"changed")
    for payload in payloads * 2:
        store.put_in_batch(payload, digest=digest_of(payload), batch=together)
    assert not set(store.digests())
    together.finish()
    assert [store.read(digest_of(payload)) for payload in payloads] == payloads
    assert len(_files(tmp_path)) == len(payloads)
    together.finish()


def test_failed_batch_leaves_no_file(tmp_path: Path) -> None:
    store, together = FolderBlobs(tmp_path), WriteBatch()
    with full_disk(after_bytes=10_000):
        for payload in (b"small", DATA, b"also small"):
            store.put_in_batch(payload, digest=digest_of(payload), batch=together)
        with pytest.raises(StateError, match="cannot use"):
            together.finish()
    assert _files(tmp_path) == []
    store.put_in_batch(DATA, digest=DIGEST, batch=together)
    together.finish()
    assert store.read(DIGEST) == DATA


def test_discarded_batch_leaves_nothing(tmp_path: Path) -> None:
    store, together = FolderBlobs(tmp_path), WriteBatch()
    for number in range(50):
        payload = bytes([number]) * 10_000
        store.put_in_batch(payload, digest=digest_of(payload), batch=together)
    together.discard()
    together.finish()
    assert _files(tmp_path) == []


def test_failed_rename_of_a_batch_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may hold submissions."""

    def fail(self: Path, _: Path) -> Path:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))

    monkeypatch.setattr(Path, "replace", fail)
    batch = WriteBatch()
    for name in ("one", "two"):
        batch.add(tmp_path / name, DATA)
    with pytest.raises(StateError, match="Input/output error"):
        batch.finish()
    assert _files(tmp_path) == []


def test_function_that_no_thread_was_started_for_never_runs() -> None:
    """The pool queues it although it raises; a later thread must not run it."""
    ran: list[str] = []
    no_thread = patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with ThreadPoolExecutor(1) as pool:
        with no_thread, pytest.raises(StateError, match="cannot start a thread that writes to the disk"):
            submit(pool, ran.append, "first")
        submit(pool, ran.append, "second").result()
    assert ran == ["second"]
