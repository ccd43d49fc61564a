"""Intake of device uploads: frames are durable, in batches, before any of them is acknowledged.

A disk that cannot be written stops the intake and nothing else: receipts ask devices to keep their uploads and try
again, until a trial write succeeds.
"""

import contextlib
import logging
import time
from collections.abc import Iterator

from aggregator.ingest import intake_status
from aggregator.ingest.chunk_store import ChunkStore
from aggregator.ingest.reassembly import Complete, Reassembly
from aggregator.storage.store import Store
from protocol.errors import StateError
from protocol.log import event
from protocol.wire.messages import Frame, Receipt

log = logging.getLogger(__name__)

TRIAL_S = 3.0
"""Seconds between trials of a stopped intake."""

EXPIRY_S = 60.0
"""Seconds between searches for uploads that were given up."""

MAX_TRIAL_BYTES = 64 * 1024**2


class Receiver:
    """The uploads of devices, until they are complete.

    Args:
        store: the state directory; it has what was accepted before.
        max_bytes: size of the largest accepted upload.
        unfinished_s: seconds without a frame after which an unfinished upload is deleted.

    Raises:
        StateError: the disk cannot be written.
    """

    def __init__(self, store: Store, *, max_bytes: int, unfinished_s: float) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._unfinished_s = unfinished_s
        self._chunks = ChunkStore(store.folder)
        self._stopped: intake_status.Stopped | None = None
        self._trial_s = self._expiry_s = 0.0
        intake_status.create(store.folder)
        self._reassembly = self._load()

    def _load(self) -> Reassembly:
        """Continue the transfers on the disk, without those that were accepted meanwhile."""
        reassembly = Reassembly(
            max_bytes=self._max_bytes,
            holds=self._store.holds,
            transfers=self._chunks.load(),
            read=self._chunks.read,
        )
        self._chunks.commit([], reassembly.ended)
        reassembly.settle()
        return reassembly

    @property
    def is_stopped(self) -> bool:
        """True while nothing can be stored."""
        return self._stopped is not None

    def close(self) -> None:
        """Close the files."""
        self._chunks.close()

    def take(self, device: str, frame: Frame) -> Receipt | Complete | None:
        """Add a frame as `Reassembly.take` does; the ranges of a receipt are durable once `commit` has returned.

        Raises:
            Refused: the frame is not accepted.
            StateError: the disk cannot be read.
        """
        if self._stopped is None:
            return self._reassembly.take(device, frame, now_s=time.time())
        if frame.offset + len(frame.data) < frame.size_bytes:
            return None
        if self._store.holds(device, frame.digest):
            return Receipt(digest=frame.digest, status="received")
        detail = "the aggregator cannot store anything at the moment"
        return Receipt(digest=frame.digest, status="refused", reason="no_space", detail=detail)

    def commit(self) -> None:
        """Make all frames durable that were taken.

        Raises:
            StateError: the disk cannot be written. Call `stop`: then none of these frames counts as arrived.
        """
        arrived, ended = self._reassembly.pending(), self._reassembly.ended
        if self._stopped is None and (arrived or ended):
            self._chunks.commit(arrived, ended)
            self._reassembly.settle()

    def stop(self, error: StateError) -> None:
        """Stop the intake, because something could not be stored."""
        if self._stopped is not None:
            log.debug("%s", error)
            return
        self._stopped = intake_status.Stopped(time.time(), str(error))
        self._trial_s = time.monotonic() + TRIAL_S
        event(log, logging.ERROR, "intake stopped: free space or fix permissions", reason=error)
        self._publish_status()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Stop the intake if the body cannot store something."""
        try:
            yield
        except StateError as error:
            self.stop(error)

    def tick(self) -> bool:
        """Let time pass; returns True if a stopped intake was resumed just now."""
        now_s = time.monotonic()
        if self._stopped is not None and now_s >= self._trial_s:
            self._trial_s = now_s + TRIAL_S
            return self._resume()
        if self._stopped is None and now_s >= self._expiry_s:
            self._expiry_s = now_s + EXPIRY_S
            self._expire()
        return False

    def _resume(self) -> bool:
        try:
            self._chunks.check_writable(min(self._max_bytes, MAX_TRIAL_BYTES))
            self._store.database.check_writable()
            self._reassembly = self._load()
        except StateError as error:
            log.debug("intake is still stopped: %s", error)
            return False
        self._stopped = None
        event(log, logging.INFO, "intake resumed")
        self._publish_status()
        return True

    def _expire(self) -> None:
        for device, digest in self._reassembly.expire(time.time() - self._unfinished_s):
            event(log, logging.INFO, "unfinished upload deleted", device=device, digest=digest)
        with self.guard():
            self.commit()

    def _publish_status(self) -> None:
        try:
            intake_status.write(self._store.folder, self._stopped)
        except StateError as error:
            event(log, logging.WARNING, "intake status not written for `aggregator status`", reason=error)
