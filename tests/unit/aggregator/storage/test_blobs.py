"""Blobs in a folder, alone and in batches, and in an object store: the same methods, and the faults of each."""

import contextlib
import errno
import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest

from aggregator.storage import blobs as blobs_module
from aggregator.storage import object_blobs
from aggregator.storage.background import WriteBatch, submit
from aggregator.storage.blobs import Blobs, FolderBlobs, open_blobs, read_each
from aggregator.storage.object_blobs import PART_BYTES, ObjectBlobs
from aggregator.storage.open_store import open_store
from protocol.errors import BlobLost, ConfigError, NoAnswer, StateError
from protocol.wire.codec import digest_of
from tests.support.machine_faults import full_disk
from tests.support.stores import object_store as proxy
from tests.support.stores.object_store import BUCKET, ObjectStore

DATA = bytes(range(256)) * 1000
DIGEST = digest_of(DATA)
OWNER = "this aggregator"


@pytest.fixture
def location() -> str:
    """A prefix of this test's own."""
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


@pytest.fixture
def objects(remote: ObjectStore, location: str, tmp_path: Path) -> ObjectBlobs:
    del remote
    blobs = ObjectBlobs(location, cache=tmp_path / "copies")
    blobs.claim(OWNER, is_new=True)
    return blobs


@pytest.fixture(params=["folder", "object store"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "folder":
        return open_blobs(str(tmp_path / "blobs"))
    objects: ObjectBlobs = request.getfixturevalue("objects")
    return objects


def path_of(blobs: Blobs, digest: bytes) -> str:
    return f"/{blobs.location.removeprefix('s3://')}/blobs/{digest.hex()}"


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
    found = list(read_each(blobs, every))
    assert [None if isinstance(each, BlobLost) else digest_of(each) for each in found] == [
        *every[:3],
        None,
        *every[4:],
    ]
    assert next(read_each(blobs, every)) == found[0]


def test_blobs_of_an_object_store_are_read_ahead_in_bounded_memory(
    objects: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are read at a time, then as many as fit."""
    every = [objects.put(secrets.token_bytes(100)) for _ in range(6)]
    monkeypatch.setattr(blobs_module, "AHEAD_BYTES", 400)
    meeting, requested = threading.Barrier(2), list[bytes]()
    read = objects.read

    def read_together(digest: bytes) -> bytes:
        requested.append(digest)
        if len(requested) <= 2:
            meeting.wait(timeout=60)
        return read(digest)

    monkeypatch.setattr(objects, "read", read_together)
    reading = read_each(objects, every)
    for taken, _ in enumerate(reading, start=1):
        assert len(requested) <= taken + 3  # the one that is taken counts, too
    assert sorted(requested) == sorted(every)


def test_unused_blobs_are_deleted(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_blobs, "GRACE", timedelta(seconds=-5))
    kept, other = blobs.put(DATA), blobs.put(b"other")
    assert blobs.verified_path(other).exists()
    blobs.keep_only({kept})
    assert list(blobs.digests()) == [kept]
    assert not blobs.path(other).exists()


def test_new_objects_are_kept_for_an_hour(objects: ObjectBlobs) -> None:
    """The transaction that refers to one may not have ended yet."""
    digest = objects.put(DATA)
    objects.keep_only(set())
    assert objects.read(digest) == DATA


def test_damaged_object_is_moved_and_can_be_stored_again(objects: ObjectBlobs, remote: ObjectStore) -> None:
    path = path_of(objects, objects.put(DATA))
    remote.direct("PUT", path, b"damaged")
    with pytest.raises(BlobLost, match="was damaged, and moved"):
        objects.read(DIGEST)
    assert DIGEST not in objects
    assert remote.direct("GET", path.replace("/blobs/", "/damaged/"))[2] == b"damaged"
    objects.put(DATA)
    assert objects.verified_path(DIGEST).read_bytes() == DATA
    objects.path(DIGEST).write_bytes(b"damaged copy")
    assert objects.verified_path(DIGEST).read_bytes() == DATA


@pytest.mark.parametrize("fault", ["500", "503", "cut", "changed", "slow"])
def test_fault_that_passes_is_not_noticed(
    objects: ObjectBlobs, remote: ObjectStore, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects.put(DATA)
    monkeypatch.setattr(object_blobs, "REQUEST_S", 1.0)
    impatient = ObjectBlobs(objects.location)
    harm(remote, fault)
    remote.only, remote.left = "GET", 1
    assert impatient.read(DIGEST) == DATA
    assert remote.harmed == 1


@pytest.mark.parametrize("fault", ["500", "503", "cut", "changed", "slow", "unreachable"])
def test_fault_that_stays_is_an_error_and_loses_nothing(
    objects: ObjectBlobs, remote: ObjectStore, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A StateError, which stops the intake, and no BlobLost, after which devices would send again."""
    objects.put(DATA)
    if fault == "unreachable":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(object_blobs, "REQUEST_S", 0.5)
    broken = ObjectBlobs(objects.location)
    harm(remote, fault)
    with pytest.raises(StateError, match=f"cannot use {objects.location}") as raised:
        broken.read(DIGEST)
    assert not isinstance(raised.value, BlobLost)
    assert "do-not-log-this" not in str(raised.value)
    if fault in ("500", "503", "unreachable"):
        batch = WriteBatch()
        broken.put_in_batch(b"new", digest=digest_of(b"new"), batch=batch)
        with pytest.raises(StateError, match="cannot use s3://"):
            batch.finish()
        for use in (lambda: DIGEST in broken, lambda: broken.keep_only(set()), broken.check_writable):
            with pytest.raises(StateError, match="cannot use s3://"):
                use()
    remote.heal()
    assert list(objects.digests()) == [DIGEST]
    assert objects.read(DIGEST) == DATA


@pytest.mark.parametrize("headers", [{}, {"Location": "https://other.example"}])
def test_endpoint_that_redirects_is_a_refusal_and_no_outage(
    headers: dict[str, str], objects: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start would wait for another answer without end."""
    monkeypatch.setattr(proxy, "request", lambda *_: (301, headers, b""))
    with pytest.raises(StateError, match="the endpoint redirects: check AWS_ENDPOINT_URL") as raised:
        objects.put(DATA)
    assert not isinstance(raised.value, NoAnswer)


def test_endpoint_without_tls_is_a_refusal_and_no_outage(
    objects: ObjectBlobs, remote: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With https:// in AWS_ENDPOINT_URL."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", remote.endpoint.replace("http:", "https:"))
    with pytest.raises(StateError, match="no TLS at this endpoint: check https://") as raised:
        ObjectBlobs(objects.location).put(DATA)
    assert not isinstance(raised.value, NoAnswer)


def harm(remote: ObjectStore, fault: str) -> None:
    count = 0

    def changed(data: bytes) -> bytes:
        nonlocal count
        count += 1
        return data[:-1] + bytes([count % 255])

    match fault:
        case "500" | "503":
            remote.status = int(fault)
        case "cut":
            remote.cut = True
        case "changed":
            remote.change = changed
        case "slow":
            remote.delay_s = 2.0


def test_deleted_bucket_is_no_lost_blob(objects: ObjectBlobs, remote: ObjectStore) -> None:
    """Otherwise all devices would be asked for their submissions, because of a wrong name or endpoint."""
    remote.direct("DELETE", path_of(objects, DIGEST).partition("/blobs/")[0] + "/owner")
    for use in (lambda: objects.read(DIGEST), lambda: DIGEST in objects, lambda: objects.keep_only(set())):
        with pytest.raises(StateError, match="owner is missing") as raised:
            use()
        assert not isinstance(raised.value, BlobLost)
    with pytest.raises(
        StateError, match="cannot use s3://no-such-bucket/a: the bucket does not exist: create it"
    ):
        ObjectBlobs("s3://no-such-bucket/a").put(DATA)


def test_store_that_answers_all_requests_alike_loses_no_blob(
    objects: ObjectBlobs, remote: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a proxy before it: the objects stay where they are."""
    objects.put(DATA)
    page = (200, {"ETag": '"1"', "Last-Modified": "Tue, 24 Nov 2026 03:00:00 GMT"}, b"under maintenance")
    with monkeypatch.context() as patch:
        patch.setattr(proxy, "request", lambda *_: page)
        with pytest.raises(NoAnswer, match="the same answer to each request"):
            objects.read(DIGEST)
    assert objects.read(DIGEST) == DATA


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        (
            "AWS_ENDPOINT_URL",
            "store.example:9000",
            "expected http:// or https:// at the start of AWS_ENDPOINT_URL",
        ),
        ("AWS_ACCESS_KEY_ID", None, "Missing AccessKeyId: check the AWS_"),
    ],
)
def test_wrong_environment_is_an_error(
    variable: str, value: str | None, error: str, objects: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a panic of the library, nor an exception that no program expects."""
    if value is None:
        monkeypatch.delenv(variable)
    else:
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=error):
        ObjectBlobs(objects.location)


@pytest.mark.parametrize("wrong", ["s3://", "s3:///prefix", "http://host/bucket", "s3://key:secret@bucket/a"])
def test_wrong_location_is_refused(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected s3://BUCKET/PREFIX") as raised:
        open_store(tmp_path / "state", blobs=wrong)
    assert "secret" not in str(raised.value)
    with pytest.raises(ConfigError, match="expected s3://BUCKET/PREFIX"):
        open_store(tmp_path / "state", blobs="/a/folder")


def test_store_remembers_its_object_store(remote: ObjectStore, location: str, tmp_path: Path) -> None:
    """Blobs of the folder are copied; another aggregator cannot use the same prefix, nor the store an empty one."""
    del remote
    with contextlib.closing(open_store(tmp_path / "state")) as store:
        store.blobs.put(DATA)
    with contextlib.closing(open_store(tmp_path / "state", blobs=location)) as store:
        assert store.blobs.read(DIGEST) == DATA
    with contextlib.closing(open_store(tmp_path / "state")) as store:
        assert store.blobs.location == location
    with pytest.raises(ConfigError, match="belongs to another aggregator"):
        open_store(tmp_path / "other", blobs=location)
    with pytest.raises(StateError, match="owner is missing"):
        open_store(tmp_path / "state", blobs=f"{location}-empty")


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
