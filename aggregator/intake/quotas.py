"""The quotas of a fleet, under `[limits]`: devices, bytes of submissions, and uploads an hour.

They are counted in the database, in the transaction that accepts what counts: a restart forgets none.
"""

from aggregator.config.schema import Limits
from aggregator.intake.validation import Refused
from aggregator.rates import TokenBuckets
from aggregator.storage.store import Store
from aggregator.storage.stored_values import UploadTokens

HOUR_S = 3600.0

LARGE_BYTES = 64 * 1024
"""Size from which a transfer is a submission: it is refused before its bytes are sent. No evaluation is larger."""

_MIB = 1024**2


class Quotas:
    """Refuses what is over a quota; without one, it reads and stores nothing."""

    def __init__(self, store: Store, limits: Limits, *, task: bytes) -> None:
        self._store = store
        self._limits = limits
        self._task = task

    def check_new_device(self, device: str) -> None:
        """Raise Refused if a device without a key is one too many."""
        most = self._limits.max_devices
        if most is not None and self._store.keys.valid() >= most:
            raise Refused(
                "quota",
                f"the fleet has as many devices as limits.max_devices allows ({most}), and {device} would be another "
                "one: the operator may raise the quota, or revoke one",
            )

    def check_transfer(self, device: str, digest: bytes, size_bytes: int) -> None:
        """Raise Refused if a large transfer, of which a device sends the last bytes first, will be over a quota."""
        is_limited = self._limits.max_storage_mb is not None or self._limits.uploads_per_hour is not None
        if is_limited and size_bytes > LARGE_BYTES and not self._store.holds(device, digest):
            self.check_submission(device, size_bytes)

    def check_submission(self, device: str, size_bytes: int) -> None:
        """Raise Refused if a submission, in place of the device's previous one, is over a quota."""
        if (most := self._limits.max_storage_bytes) is not None:
            others = self._store.submissions.stored_bytes(task=self._task, without=device)
            if others + size_bytes > most:
                raise Refused(
                    "quota",
                    f"the fleet stores {others / _MIB:.1f} of {most / _MIB:g} MiB (limits.max_storage_mb), this would "
                    f"add {size_bytes / _MIB:.1f}: the operator may raise the quota, or forget devices",
                )
        if (hourly := self._limits.uploads_per_hour) is not None:
            wait_s = self._uploads(hourly).wait_s("", now_s=self._store.clock.now_s())
            if wait_s:
                raise Refused(
                    "quota",
                    f"the fleet has uploaded {hourly} submissions (limits.uploads_per_hour): the next one is accepted "
                    f"in {wait_s:.0f} s; the operator may raise the quota",
                )

    def count_upload(self) -> None:
        """Count an accepted submission, in the transaction that stores it."""
        if (hourly := self._limits.uploads_per_hour) is None:
            return
        tokens = self._uploads(hourly)
        if tokens.take("", now_s=self._store.clock.now_s()) and (left := tokens.left("")) is not None:
            self._store.facts.put(UploadTokens(*left))

    def _uploads(self, hourly: int) -> TokenBuckets[str]:
        return upload_tokens(hourly, self._store.facts.get(UploadTokens))


def upload_tokens(hourly: int, stored: UploadTokens | None) -> TokenBuckets[str]:
    """Return the bucket of `limits.uploads_per_hour`, under the key ""."""
    left = {"": (stored.left, stored.at_s)} if stored is not None else {}
    return TokenBuckets[str](capacity=hourly, per_s=hourly / HOUR_S, left=left)
