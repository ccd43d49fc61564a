"""Where frames become durable: in batches on the disk, before anybody is told that they are there.

A disk that takes nothing stops the intake, and nothing else: devices are told to keep what they have and to ask
again later, until a trial shows that there is room.
"""

import logging
import time

from aggregator.ingest import intake_status
from aggregator.ingest.chunk_index import Incoming
from aggregator.ingest.reassembly import Complete, Uplink
from aggregator.storage.store import Store
from protocol.errors import StateError
from protocol.wire.messages import Frame, Receipt

log = logging.getLogger(__name__)

TRIAL_S = 3.0
LOOK_S = 60.0
MAX_TRIAL_BYTES = 64 * 1024**2


class Reception:
    """What comes in from devices, until it is complete.

    Args:
        store: what was taken before, in whose folder unfinished transfers are kept.
        max_bytes: the largest transfer that is taken.
        unfinished_s: seconds without a frame after which an unfinished transfer is given up.

    Raises:
        StateError: the disk cannot be written.
    """

    def __init__(self, store: Store, *, max_bytes: int, unfinished_s: float) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._unfinished_s = unfinished_s
        self._incoming = Incoming(store.folder)
        self._stopped: intake_status.Stopped | None = None
        self._trial_s = self._look_s = 0.0
        self._trial_bytes = min(max_bytes, MAX_TRIAL_BYTES)
        intake_status.begin(store.folder)
        self._uplink = self._begin()

    def _begin(self) -> Uplink:
        """Go on with what the disk has of transfers, but not of those that were taken meanwhile."""
        uplink = Uplink(
            max_bytes=self._max_bytes, stored=self._incoming.transfers(), read=self._incoming.read
        )
        uplink.drop_if(self._store.holds)
        self._incoming.commit(uplink.changes())
        uplink.settle()
        return uplink

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is taken."""
        return self._stopped is not None

    def close(self) -> None:
        """Close the file."""
        self._incoming.close()

    def take(self, device: str, frame: Frame) -> Receipt | Complete | None:
        """Take a frame, as `Uplink.take` does; what it says of what is missing holds once `commit` was called.

        Raises:
            Refused: it is not taken.
            StateError: the disk cannot be read.
        """
        if self._stopped is None:
            return self._uplink.take(device, frame, holds=self._store.holds, now_s=time.time())
        if frame.offset + len(frame.data) < frame.size_bytes:
            return None
        if self._store.holds(device, frame.digest):
            return Receipt(digest=frame.digest, status="received")
        return no_space(frame.digest)

    def commit(self) -> None:
        """Make durable what was taken.

        Raises:
            StateError: it cannot be; all of it counts as never come once the intake was stopped.
        """
        changes = self._uplink.changes()
        if self._stopped is None and changes:
            self._incoming.commit(changes)
            self._uplink.settle()

    def stop(self, error: StateError) -> None:
        """Take nothing for the time being, as something could not be stored."""
        if self._stopped is not None:
            log.debug("%s", error)
            return
        self._stopped = intake_status.Stopped(time.time(), str(error))
        self._trial_s = time.monotonic() + TRIAL_S
        log.error("intake is stopped: %s; free space or fix the permissions, devices will ask again", error)
        self._tell()

    def tick(self) -> bool:
        """Try whether a stopped intake can go on; returns whether it does so just now. Clear what is too old."""
        now_s = time.monotonic()
        if self._stopped is not None:
            if now_s < self._trial_s:
                return False
            self._trial_s = now_s + TRIAL_S
            return self._try()
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            self._clear()
        return False

    def _try(self) -> bool:
        try:
            self._incoming.try_to_write(self._trial_bytes)
            self._store.database.check_writable()
            self._uplink = self._begin()
        except StateError as error:
            log.debug("intake is still stopped: %s", error)
            return False
        self._stopped = None
        log.info("intake goes on: what devices upload can be stored again")
        self._tell()
        return True

    def _clear(self) -> None:
        old = self._uplink.expire(time.time() - self._unfinished_s)
        for device, digest in old:
            log.info(
                "given up: transfer %s of %s, which has not gone on for too long", digest.hex()[:12], device
            )
        try:
            self.commit()
            self._incoming.shrink()
        except StateError as error:
            self.stop(error)

    def _tell(self) -> None:
        try:
            intake_status.tell(self._store.folder, self._stopped)
        except StateError as error:
            log.warning("`aggregator status` cannot show whether intake is stopped: %s", error)


def no_space(digest: bytes) -> Receipt:
    """What a device gets that asks about a transfer while nothing can be stored."""
    detail = "the aggregator cannot store anything at the moment"
    return Receipt(digest=digest, status="refused", reason="no_space", detail=detail)
