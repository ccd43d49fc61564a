"""Blobs in an object store: the methods of those in a folder, and its faults."""

import contextlib
import secrets
import threading
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path

import pytest

from aggregator.cluster import object_blobs
from aggregator.cluster.object_blobs import ObjectBlobs
from aggregator.storage.background import WriteBatch
from aggregator.storage.open_store import open_store
from protocol.errors import BlobLost, ConfigError, StateError
from protocol.wire.codec import digest_of
from tests.support.stores import object_store as proxy
from tests.support.stores.object_store import BUCKET, ObjectStore
from tests.unit.aggregator.storage.test_blobs import (
    DATA,
    DIGEST,
    test_batch_is_durable_once_it_is_finished,
    test_blob_is_read_back_until_it_is_deleted,
    test_each_blob_is_read_in_order,
    test_unused_blobs_are_deleted,
)

__all__ = [
    "test_batch_is_durable_once_it_is_finished",
    "test_blob_is_read_back_until_it_is_deleted",
    "test_each_blob_is_read_in_order",
    "test_unused_blobs_are_deleted",
]

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


@pytest.fixture
def blobs(objects: ObjectBlobs, monkeypatch: pytest.MonkeyPatch) -> ObjectBlobs:
    """For the tests of a folder's blobs, of which new ones are deleted, too."""
    monkeypatch.setattr(object_blobs, "GRACE", timedelta(seconds=-5))
    return objects


def path_of(blobs: ObjectBlobs, digest: bytes) -> str:
    return f"/{blobs.location.removeprefix('s3://')}/blobs/{digest.hex()}"


def test_blobs_of_an_object_store_are_read_ahead_in_bounded_memory(
    objects: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are read at a time, then as many as fit."""
    every = [objects.put(secrets.token_bytes(100)) for _ in range(6)]
    monkeypatch.setattr(object_blobs, "AHEAD_BYTES", 400)
    meeting, requested = threading.Barrier(2), list[bytes]()
    read = objects.read

    def read_together(digest: bytes) -> bytes:
        requested.append(digest)
        if len(requested) <= 2:
            meeting.wait(timeout=60)
        return read(digest)

    monkeypatch.setattr(objects, "read", read_together)
    reading = objects.read_each(every)
    for taken, _ in enumerate(reading, start=1):
        assert len(requested) <= taken + 3  # the one that is taken counts, too
    assert sorted(requested) == sorted(every)


def _nothing(_: Collection[bytes]) -> set[bytes]:
    """No blob is needed."""
    return set()


def test_new_objects_are_kept_for_an_hour(objects: ObjectBlobs) -> None:
    """The transaction that refers to one may not have ended yet."""
    digest = objects.put(DATA)
    list(objects.delete_unneeded(_nothing))
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
        for use in (
            lambda: DIGEST in broken,
            lambda: next(broken.delete_unneeded(_nothing)),
            broken.check_writable,
        ):
            with pytest.raises(StateError, match="cannot use s3://"):
                use()
    remote.heal()
    assert list(objects.digests()) == [DIGEST]
    assert objects.read(DIGEST) == DATA


@pytest.mark.parametrize("headers", [{}, {"Location": "https://other.example"}])
def test_endpoint_that_redirects_is_named(
    headers: dict[str, str], objects: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "request", lambda *_: (301, headers, b""))
    with pytest.raises(StateError, match="the endpoint redirects: check AWS_ENDPOINT_URL"):
        objects.put(DATA)


def test_endpoint_without_tls_is_named(
    objects: ObjectBlobs, remote: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With https:// in AWS_ENDPOINT_URL."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", remote.endpoint.replace("http:", "https:"))
    with pytest.raises(StateError, match="no TLS at this endpoint: check https://"):
        ObjectBlobs(objects.location).put(DATA)


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
    for use in (
        lambda: objects.read(DIGEST),
        lambda: DIGEST in objects,
        lambda: next(objects.delete_unneeded(_nothing)),
    ):
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
        with pytest.raises(StateError, match="the same answer to each request"):
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


@pytest.mark.parametrize("wrong", ["s3://", "s3:///prefix", "s3://key:secret@bucket/a"])
def test_wrong_location_is_refused(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected s3://BUCKET/PREFIX") as raised:
        open_store(tmp_path / "state", blobs=wrong)
    assert "secret" not in str(raised.value)
    with pytest.raises(ConfigError, match="expected a URL that begins with s3://"):
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
