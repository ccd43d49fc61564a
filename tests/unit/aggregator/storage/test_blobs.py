"""Blobs in a folder, alone and in batches."""

import errno
import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from aggregator.storage.background import WriteBatch, submit
from aggregator.storage.blobs import Blobs, FolderBlobs, open_blobs
from protocol.errors import BlobLost, StateError
from protocol.wire.codec import digest_of
from tests.support.machine_faults import full_disk

DATA = bytes(range(256)) * 1000
DIGEST = digest_of(DATA)

PART_BYTES = 8 * 1024**2
"""Bytes that an object store sends at once."""


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return open_blobs(str(tmp_path / "blobs"))


def test_blob_is_read_back_until_it_is_deleted(blobs: Blobs) -> None:
    """Also an empty one, one in several parts, and by another process that opens the location."""
    large = secrets.token_bytes(2 * PART_BYTES + 1)
    with pytest.raises(BlobLost, match=DIGEST.hex()):
        blobs.read(DIGEST)
    with pytest.raises(BlobLost):
        blobs.verified_path(DIGEST)
    assert DIGEST not in blobs
    assert not blobs.is_whole(DIGEST)
    every = {blobs.put(data): data for data in (DATA, DATA, b"", large)}
    assert DIGEST in every
    other = open_blobs(blobs.location)
    for digest, data in every.items():
        assert digest in blobs
        assert blobs.is_whole(digest)
        assert blobs.read(digest) == other.read(digest) == data
        assert blobs.verified_path(digest) == blobs.path(digest)
        assert blobs.path(digest).read_bytes() == data
        assert blobs.size(digest) == len(data)
    assert sorted(blobs.digests()) == sorted(every)
    blobs.check_writable()
    blobs.delete([DIGEST, digest_of(b"unknown")])
    assert sorted(blobs.digests()) == sorted(every.keys() - {DIGEST})
    with pytest.raises(BlobLost):
        blobs.read(DIGEST)
    assert not blobs.path(DIGEST).exists()


def test_batch_is_durable_once_it_is_finished(blobs: Blobs) -> None:
    batch, every = WriteBatch(), [secrets.token_bytes(100) for _ in range(40)]
    for data in every:
        blobs.put_in_batch(data, digest=digest_of(data), batch=batch)
    batch.finish()
    assert sorted(blobs.digests()) == sorted(map(digest_of, every))
    assert [blobs.read(digest_of(data)) for data in every] == every
    blobs.put_in_batch(DATA, digest=DIGEST, batch=batch)
    batch.discard()
    batch.finish()


def test_each_blob_is_read_in_order(blobs: Blobs) -> None:
    """A lost one is an error in its place; reading may end before the last one."""
    every = [blobs.put(secrets.token_bytes(100)) for _ in range(20)]
    blobs.delete([every[3]])
    found = list(blobs.read_each(every))
    assert [None if isinstance(each, BlobLost) else digest_of(each) for each in found] == [
        *every[:3],
        None,
        *every[4:],
    ]
    assert next(blobs.read_each(every)) == found[0]


def test_unused_blobs_are_deleted(blobs: Blobs) -> None:
    kept, other = blobs.put(DATA), blobs.put(b"other")
    assert blobs.verified_path(other).exists()
    list(blobs.delete_unneeded({kept}.intersection))
    assert list(blobs.digests()) == [kept]
    assert not blobs.path(other).exists()


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
