"""Blobs in an S3-compatible object store, by their sha256, with a folder of copies for files that are read as paths.

The objects are PREFIX/blobs/HEX. PREFIX/owner names the one aggregator whose they are, and PREFIX/damaged/HEX keeps
objects whose contents are not what their names say.
"""

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit
from uuid import uuid4

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from aggregator.storage.background import WriteBatch, submit
from aggregator.storage.blobs import blob_or_loss
from aggregator.storage.stored_values import BlobLocation
from protocol.errors import BlobLost, ConfigError, StateError
from protocol.storage.blobstore import BlobStore
from protocol.storage.facts import Facts
from protocol.wire.codec import digest_of

PART_BYTES = 8 * 1024**2
"""Bytes of one request: larger blobs are sent and read in parts."""

PAGE = 1000
"""Objects that one request lists."""

REQUEST_S = 10.0
"""Seconds for one request, its body included."""

RETRY_S = 10.0
"""Seconds after which a failed request is not repeated: the transaction that waits for it ends within a minute."""

READS_S = (0.0, 0.1, 0.4)
"""Seconds before each attempt to read an object: wrong answers of the store may pass."""

GRACE = timedelta(hours=1)
"""Age below which no object is deleted: the transaction that refers to it may not have ended."""

THREADS = 16
"""Uploads at a time: one takes as long as the network takes, not the disk."""

AHEAD = 8
"""Blobs that are in memory or on their way, at most."""

AHEAD_BYTES = 64 * 1024**2
"""Their bytes, if none is larger than the largest one so far; a larger blob is read alone."""

MAX_REASON = 300

_REDIRECTS = "the endpoint redirects: check AWS_ENDPOINT_URL and AWS_REGION"

_ADVICE = {
    "169.254.169.254": "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "InvalidContentType": "no TLS at this endpoint: check https:// in AWS_ENDPOINT_URL",
    "status code: 301": _REDIRECTS,
    "redirect without LOCATION": _REDIRECTS,
}
"""Advice for errors of the library that contain a text.

Without other credentials it asks the metadata service of a machine at AWS. InvalidContentType is its name of an answer
that is not TLS.
"""

_DIGEST = re.compile("[0-9a-f]{64}")


class ObjectBlobs:
    """Blobs below `s3://BUCKET/PREFIX`, with the methods of `BlobStore`; the usual AWS_* variables are read.

    Args:
        location: of the form s3://BUCKET/PREFIX.
        cache: folder of the blobs that are read as paths; without one, a temporary folder.

    Raises:
        ConfigError: the location is of another form.
    """

    def __init__(self, location: str, *, cache: Path | None = None) -> None:
        self.location = location.rstrip("/")
        self._store, self._prefix = _open(self.location)
        self._temporary = None if cache else TemporaryDirectory(prefix="protofleet-blobs-")
        self._owner_key, self._trial_key = f"{self._prefix}owner", f"{self._prefix}trial"
        self._cache = BlobStore(cache or Path(self._temporary.name if self._temporary else ""))
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="uploading")
        self._lock = threading.Lock()
        """Held while a copy is downloaded."""

    def claim(self, owner: str, *, is_new: bool) -> None:
        """Check that the objects are those of `owner`; where `is_new`, they may become its own.

        Raises:
            ConfigError: they belong to another aggregator, which would lose them here.
            StateError: the store cannot be used, or the object that names the owner is missing.
        """
        if is_new and self._get(self._owner_key) is None:
            with self._errors(), contextlib.suppress(AlreadyExistsError, FileExistsError):
                obstore.put(self._store, self._owner_key, owner.encode(), mode="create")
        stored = self._get(self._owner_key)
        if stored is None:
            raise StateError(
                f"{self.location}/owner is missing: another bucket or endpoint, or objects were deleted. Copy all "
                f"objects there; or write {owner} into it, and devices send again what is lost"
            )
        if stored != owner.encode():
            raise ConfigError(f"{self.location} belongs to another aggregator: give each a prefix of its own")

    def check_writable(self) -> None:
        self._put(self._trial_key, b"")

    def __contains__(self, digest: bytes) -> bool:
        with self._errors(), contextlib.suppress(FileNotFoundError):
            obstore.head(self._store, self._key(digest))
            return True
        self._check_owner()
        return False

    def digests(self) -> Iterator[bytes]:
        for page in self._pages():
            for key, _ in page:
                yield bytes.fromhex(key[-64:])

    def put(self, data: bytes) -> bytes:
        """Store `data` and return its digest; one that exists is replaced, and is as new for `delete_unneeded`."""
        digest = digest_of(data)
        self._put(self._key(digest), data)
        return digest

    def put_in_batch(self, data: bytes, *, digest: bytes, batch: WriteBatch) -> None:
        if (key := self._key(digest)) not in batch:
            batch.add_elsewhere(key, submit(self._pool, self._put, key, data))

    def is_whole(self, digest: bytes) -> bool:
        try:
            self.read(digest)
        except BlobLost:
            return False
        return True

    def size(self, digest: bytes) -> int:
        """Return the bytes of a blob's copy; raises StateError if there is none."""
        return self._cache.size(digest)

    def path(self, digest: bytes) -> Path:
        """Return the path of a blob's copy, which exists once `verified_path` has returned it."""
        return self._cache.path(digest)

    def read(self, digest: bytes) -> bytes:
        """Return a blob after verifying its digest.

        Raises:
            BlobLost: the object does not exist, or has the same wrong contents in each attempt; it is moved to
                `damaged`.
            StateError: it cannot be read for another reason, or what arrives is not what is stored.
        """
        wrong: set[bytes | None] = set()
        for pause_s in READS_S:
            time.sleep(pause_s)
            data = self._get(self._key(digest))
            got = None if data is None else digest_of(data)
            if data is not None and got == digest:
                return data
            wrong.add(got)
        if len(wrong) > 1:
            raise StateError(
                f"cannot use {self.location}: {digest.hex()} arrives with other contents each time"
            )
        if digest_of(self._check_owner()) in wrong:
            raise StateError(f"cannot use {self.location}: it gives the same answer to each request")
        if None not in wrong:
            raise self._moved(digest)
        raise BlobLost(digest, f"{self.location}/blobs/{digest.hex()} is missing")

    def read_each(self, digests: Iterable[bytes]) -> Iterator[bytes | BlobLost]:
        """Yield each blob, or the error of one that is lost; several are read at a time."""
        pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="reading")
        reading: deque[Future[bytes | BlobLost]] = deque()
        largest, limit = 1, 2
        try:
            for digest in digests:
                reading.append(submit(pool, blob_or_loss, self, digest))
                while len(reading) >= limit:
                    blob = reading.popleft().result()
                    largest = max(largest, len(blob) if isinstance(blob, bytes) else 0)
                    limit = max(1, min(AHEAD, AHEAD_BYTES // largest))
                    yield blob
            for each in reading:
                yield each.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def verified_path(self, digest: bytes) -> Path:
        """Return the path of a blob's verified copy, downloading it first if necessary; raises what `read` does."""
        with self._lock:
            if not self._cache.is_whole(digest):
                self._cache.create()
                self._cache.put(self.read(digest))
            return self._cache.path(digest)

    def delete(self, digests: Collection[bytes]) -> None:
        """Delete blobs, damaged ones and copies too, if they exist; raises StateError if one cannot be deleted."""
        self._delete([self._key(digest) for digest in digests])
        self._delete([self._key(digest, folder="damaged") for digest in digests])
        self._cache.delete(digests)

    def delete_unneeded(self, needed: Callable[[Collection[bytes]], Collection[bytes]]) -> Iterator[None]:
        """Delete copies that are not needed, and blobs that are older than an hour by the store's clock."""
        yield from self._cache.delete_unneeded(needed)
        self._check_owner()
        self.check_writable()
        with self._errors():
            before = obstore.head(self._store, self._trial_key)["last_modified"] - GRACE
        for page in self._pages():
            old = {bytes.fromhex(key[-64:]): key for key, written in page if written < before}
            kept = needed(old)
            self._delete([key for digest, key in old.items() if digest not in kept])
            yield

    def _key(self, digest: bytes, *, folder: str = "blobs") -> str:
        return f"{self._prefix}{folder}/{digest.hex()}"

    def _check_owner(self) -> bytes:
        """Return the object `owner`; raises StateError if the whole store is gone: then no single blob is lost."""
        owner = self._get(self._owner_key)
        if owner is None:
            raise StateError(f"cannot use {self.location}: {self.location}/owner is missing")
        return owner

    def _pages(self) -> Iterator[list[tuple[str, datetime]]]:
        """Yield the keys of all blobs, `PAGE` at a time, with the times when they were written."""
        folder = f"{self._prefix}blobs/"
        with self._errors():
            for page in obstore.list(self._store, folder, chunk_size=PAGE):
                yield [
                    (each["path"], each["last_modified"])
                    for each in page
                    if _DIGEST.fullmatch(each["path"].removeprefix(folder))
                ]

    def _put(self, key: str, data: bytes) -> None:
        with self._errors():
            obstore.put(self._store, key, data, chunk_size=PART_BYTES, max_concurrency=4)

    def _get(self, key: str) -> bytes | None:
        with self._errors():
            try:
                result = obstore.get(self._store, key)
            except FileNotFoundError:
                return None
            size = result.meta["size"]
            if size <= PART_BYTES:
                return bytes(result.bytes())
            del result  # and its connection
            bounds = pairwise([*range(0, size, PART_BYTES), size])
            parts = (obstore.get_range(self._store, key, start=start, end=end) for start, end in bounds)
            return b"".join(map(bytes, parts))

    def _delete(self, keys: list[str]) -> None:
        if keys:
            with self._errors(), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, keys)

    def _moved(self, digest: bytes) -> BlobLost:
        """Move a damaged object, so that it is uploaded again, and return the error to raise."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            obstore.rename(self._store, self._key(digest), self._key(digest, folder="damaged"))
        moved = f"{self.location}/damaged/{digest.hex()}"
        return BlobLost(digest, f"{self.location}/blobs/{digest.hex()} was damaged, and moved to {moved}")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise StateError if the store cannot be used."""
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            raise StateError(f"cannot use {self.location}: {_reason(error)}") from None


def open_blobs(location: str) -> ObjectBlobs:
    return ObjectBlobs(location)


def blobs_of(folder: Path, facts: Facts, location: str) -> ObjectBlobs:
    """Return the blobs of the aggregator with a state directory, which remembers the location.

    The blobs of the directory are copied to an object store that is given for the first time.

    Raises:
        ConfigError: the location is of another form, or another aggregator's.
        StateError: it cannot be used, or is not the one that the database refers to.
    """
    stored, location = facts.get(BlobLocation) or BlobLocation(owner=uuid4().hex), location.rstrip("/")
    blobs = ObjectBlobs(location, cache=folder / "copies")
    is_first = not stored.location
    if is_first:
        facts.put(stored)  # before the claim: an interrupted start claims it again
    blobs.claim(stored.owner, is_new=is_first)
    if is_first and (folder / "blobs").is_dir():
        before = BlobStore(folder / "blobs")
        for digest in before.digests():
            if before.is_whole(digest):
                blobs.put(before.read(digest))
    if location != stored.location:
        facts.put(BlobLocation(owner=stored.owner, location=location))
    return blobs


def _open(location: str) -> tuple[S3Store, str]:
    """Return the store, and the start of all its keys."""
    parts = urlsplit(location)
    if parts.scheme != "s3" or not parts.netloc or "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            "expected s3://BUCKET/PREFIX for --blobs, credentials in AWS_* variables; without it, blobs stay in place"
        )
    endpoint = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", ""))
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"expected http:// or https:// at the start of AWS_ENDPOINT_URL, got {endpoint!r}")
    prefix = parts.path.strip("/")
    try:
        store = S3Store(
            parts.netloc,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=3),
                "timeout": timedelta(seconds=REQUEST_S),
            },
            retry_config={
                "max_retries": 3,
                "retry_timeout": timedelta(seconds=RETRY_S),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=2),
                    "base": 2,
                },
            },
        )
    except BaseError as error:
        raise ConfigError(f"cannot use {location}: {_reason(error)}: check the AWS_* variables") from None
    return store, f"{prefix}/" if prefix else ""


def _reason(error: Exception) -> str:
    """Return why a request failed, short, and what to do about it if that is known."""
    reason = " ".join(str(error).split("\n\nDebug source")[0].split())
    if "<Code>NoSuchBucket<" in reason:
        return "the bucket does not exist: create it, or check --blobs, AWS_ENDPOINT_URL and AWS_REGION"
    for text, advice in _ADVICE.items():
        if text in str(error):
            return f"{advice}: {reason}"[:MAX_REASON]
    return reason[:MAX_REASON]
