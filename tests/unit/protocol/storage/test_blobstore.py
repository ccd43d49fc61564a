"""Blobs on disk: atomic, resumed, verified, and disk errors named."""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import BlobLost, StateError, TransferError
from protocol.storage.blobstore import (
    MAX_DAMAGED,
    MAX_WRITE_S,
    BlobStore,
    create_atomically,
    delete_temporary_files,
    file_digest,
    write_atomically,
)
from protocol.wire.codec import digest_of
from tests.support.machine_faults import full_disk, open_folder, read_only

DATA = bytes(range(256)) * 1000
DIGEST = digest_of(DATA)


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_put_blob_is_read_back(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "deep" / "blobs")
    assert DIGEST not in store
    assert store.put(DATA) == store.put(DATA) == DIGEST
    again = BlobStore(store.folder)
    assert DIGEST in again
    assert again.read(DIGEST) == DATA
    (store.folder / "README").write_text("no digest")
    assert list(again.digests()) == [DIGEST]
    assert file_digest(again.path(DIGEST)) == DIGEST
    assert again.put(b"") in again


@given(cuts=st.lists(st.integers(0, len(DATA)), max_size=6))
def test_download_resumes_after_any_interruption(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("blobs")
    for stop in [*sorted(cuts), len(DATA)]:
        store = BlobStore(folder)
        store.append(DIGEST, DATA[store.partial_bytes(DIGEST) : stop])
        assert store.partial_bytes(DIGEST) == stop
        assert DIGEST not in store
    assert store.finish(DIGEST) == store.path(DIGEST)
    assert store.read(DIGEST) == DATA
    assert store.partial_bytes(DIGEST) == 0


def test_a_folder_that_may_not_be_searched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is neither a stack trace nor "there is no such blob"."""

    def denied(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    store = BlobStore(tmp_path)
    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(StateError, match=f"cannot use {tmp_path}/{DIGEST.hex()}: Permission denied"):
        assert DIGEST in store


def test_damaged_download_or_blob_is_refused_and_deleted(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    store.append(DIGEST, b"other bytes")
    with pytest.raises(TransferError, match=f"expected sha256 {DIGEST.hex()}, got .*downloading it again"):
        store.finish(DIGEST)
    assert (DIGEST in store, store.partial_bytes(DIGEST)) == (False, 0)
    store.path(store.put(DATA)).write_bytes(b"?" + DATA[1:])
    with pytest.raises(StateError, match=f"{DIGEST.hex()} was damaged on disk and has been deleted"):
        store.read(DIGEST)
    assert DIGEST not in store


def test_damaged_blobs_are_moved_apart(tmp_path: Path) -> None:
    """The last few are kept, whether they were read, or put again."""
    store = BlobStore(tmp_path / "blobs", damaged=tmp_path / "damaged")
    store.path(store.put(DATA)).write_bytes(b"damaged")
    with pytest.raises(
        BlobLost, match=f"{DIGEST.hex()} was damaged on disk and has been moved to .*/damaged"
    ):
        store.verified_path(DIGEST)
    assert (tmp_path / "damaged" / DIGEST.hex()).read_bytes() == b"damaged"
    for number in range(MAX_DAMAGED + 3):
        path = store.path(store.put(b"%d" % number))
        path.write_bytes(b"damaged too")
        store.put(b"%d" % number)
        assert path.read_bytes() == b"%d" % number
    assert len(_files(tmp_path / "damaged")) == MAX_DAMAGED


def test_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "head.onnx"
    write_atomically(path, b"a long older version")
    write_atomically(path, b"first")
    assert path.read_bytes() == b"first"
    with full_disk(after_bytes=1000), pytest.raises(StateError, match=rf"cannot use {path}: .+"):
        write_atomically(path, DATA)
    assert path.read_bytes() == b"first"
    assert _files(tmp_path) == ["head.onnx"]


def test_unwritable_folder_is_named() -> None:
    with open_folder() as folder:
        store = BlobStore(folder / "blobs")
        store.put(b"old")
        store.path(digest_of(b"old")).chmod(0o644)
        with read_only(folder):
            assert BlobStore(store.folder).read(digest_of(b"old")) == b"old"
            with pytest.raises(StateError, match="Permission denied"):
                store.put(DATA)
            with pytest.raises(StateError, match="Permission denied"):
                store.append(DIGEST, DATA)
            with pytest.raises(StateError, match=rf"cannot use {folder}/other.*: Permission denied"):
                BlobStore(folder / "other")
        assert DIGEST not in store


def test_keep_only_deletes_the_rest(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    kept, old = store.put(b"kept"), store.put(b"old")
    store.append(digest_of(b"wanted"), b"wan")
    store.append(digest_of(b"unwanted"), b"un")
    (tmp_path / ".0123abcd-left").write_bytes(b"half")
    os.utime(tmp_path / ".0123abcd-left", (0, 0))
    (tmp_path / ".4567cdef-now").write_bytes(b"half")
    store.keep_only({kept, digest_of(b"wanted")})
    assert kept in store
    assert old not in store
    assert _files(tmp_path) == sorted([".4567cdef-now", kept.hex(), digest_of(b"wanted").hex()])


def _failing(monkeypatch: pytest.MonkeyPatch, name: str, *, times: int) -> None:
    """Make a method of Path fail with EIO so often."""
    original, left = getattr(Path, name), iter(range(times))

    def fail(self: Path, *arguments: object, **options: object) -> object:
        if next(left, None) is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return original(self, *arguments, **options)

    monkeypatch.setattr(Path, name, fail)


def test_blob_that_the_disk_fails_to_read_once_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second failure means that the file is unreadable: only then is it deleted."""
    store = BlobStore(tmp_path)
    store.put(DATA)
    with monkeypatch.context() as patch:
        _failing(patch, "open", times=1)
        assert store.read(DIGEST) == DATA
    with monkeypatch.context() as patch:
        _failing(patch, "open", times=2)
        with pytest.raises(BlobLost):
            store.read(DIGEST)
    assert DIGEST not in store


def test_failed_rename_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold a key."""
    _failing(monkeypatch, "replace", times=1)
    with pytest.raises(StateError, match="Input/output error"):
        write_atomically(tmp_path / "signing.key", DATA)
    assert _files(tmp_path) == []


def test_temporary_files_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    """Wherever they are; one that another process may be writing stays, and so does every other file."""
    (tmp_path / "identity").mkdir()
    old, young, other = (
        tmp_path / "identity" / name for name in (".signing.key-abcd1234", ".ca.key-abcd1234", ".gitignore")
    )
    for file in (old, young, other):
        file.write_bytes(b"key")
    long_ago_s = time.time() - 2 * MAX_WRITE_S
    for file in (old, other):
        os.utime(file, (long_ago_s, long_ago_s))
    delete_temporary_files(tmp_path)
    assert _files(tmp_path) == sorted([young.name, other.name])


def test_temporary_folders_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    """With what they hold, such as private keys; a folder of another name stays, and so does one that is linked."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "photo.jpg").write_bytes(b"photo")
    (tmp_path / ".linked-abcdefgh").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    for folder in (".enroll-abcdefgh", "training"):
        (tmp_path / folder / "shed-1").mkdir(parents=True)
        (tmp_path / folder / "shed-1" / "device.key").write_bytes(b"key")
    delete_temporary_files(tmp_path)
    assert not (tmp_path / ".enroll-abcdefgh").exists()
    assert (tmp_path / "training" / "shed-1" / "device.key").exists()
    assert (tmp_path / "elsewhere" / "photo.jpg").exists()


def test_temporary_files_that_vanish_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer renames its file between the listing and the look at it; another process deletes a folder."""
    identity, gone = tmp_path / "identity", tmp_path / "jobs"
    for folder in (identity, gone):
        folder.mkdir()
    young = identity / ".signing.key-abcd1234"
    young.write_bytes(b"new")
    stat_of, scan = Path.stat, os.scandir

    def renamed_before(path: Path, **options: bool) -> os.stat_result:
        if path == young:
            young.replace(identity / "signing.key")
        return stat_of(path, **options)

    def deleted_before(path: str) -> Iterator[os.DirEntry[str]]:
        if Path(path) == gone:
            gone.rmdir()
        return scan(path)

    monkeypatch.setattr(Path, "stat", renamed_before)
    monkeypatch.setattr(os, "scandir", deleted_before)
    delete_temporary_files(tmp_path)
    monkeypatch.undo()
    assert [file.name for file in identity.iterdir()] == ["signing.key"]
    assert not gone.exists()


def test_temporary_name_of_a_created_file_is_deleted(tmp_path: Path) -> None:
    """A process was killed between the file's own name and the end of the temporary one."""
    created = tmp_path / "aggregator.sqlite"
    created.write_bytes(b"in use")
    (tmp_path / ".aggregator.sqlit-t3_y8_fr").hardlink_to(created)
    delete_temporary_files(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["aggregator.sqlite"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_folder_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Some file systems refuse that with EINVAL, and the file is written; any other error is one."""
    fsync = os.fsync

    def refuse_folders(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    refused = pytest.raises(StateError) if number == errno.EIO else contextlib.nullcontext()
    with refused:
        write_atomically(tmp_path / "file", DATA)
    assert (tmp_path / "file").read_bytes() == DATA


def test_first_of_two_creations_counts(tmp_path: Path) -> None:
    """The second one, which may be another process's, replaces nothing that the first has opened."""
    file = tmp_path / "file"
    create_atomically(file, b"first", mode=0o600)
    create_atomically(file, b"second")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"first", 0o600)
    assert list(tmp_path.iterdir()) == [file]
