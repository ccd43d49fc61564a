"""The limits of devices and of the fleet under `[limits]`: devices, bytes of submissions, and uploads an hour.

They are counted in the database, in the transaction that accepts what counts: a restart forgets none.
"""

from aggregator.config.limits import Limits
from aggregator.intake.validation import Refused
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from aggregator.storage.usage import FLEET, Usage

LARGE_BYTES = 64 * 1024
"""Size from which a transfer is a submission: it is refused before its bytes are sent. No evaluation is larger."""

_MIB = 1024**2


class Quotas:
    """Refuses what is over a limit, and counts what is accepted."""

    def __init__(self, store: Store, limits: Limits, *, task: bytes) -> None:
        self._store = store
        self._limits = limits
        self._task = task
        self._stored: tuple[int, int] | None = None
        """The newest deletion, and the bytes of all submissions since: a sum over all rows takes long."""

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
        """Raise Refused if a large transfer, of which a device sends the last bytes first, will be over a limit."""
        if size_bytes > LARGE_BYTES:
            try:
                self._check_submission(device, digest, size_bytes)
            except Refused:
                if not self._store.holds(device, digest):
                    raise

    def count_submission(self, record: SubmissionRecord) -> None:
        """Count a submission, before it is stored in the same transaction; raises Refused if it is over a limit."""
        digest, size_bytes = record.entry.digest, record.size_bytes
        usage = self._check_submission(record.device, digest, size_bytes)
        if self._limits.max_storage_bytes is not None:
            newest, stored = self._stored_bytes()
            self._stored = newest, stored + self._added_bytes(record.device, digest, size_bytes)
        if self._limits.uploads_per_hour is not None:
            self._store.usages.put(FLEET, self._usage(FLEET).plus(submissions=1))
        self._store.usages.put(record.device, usage.plus(submissions=1, size_bytes=size_bytes))

    def count_evaluation(self, device: str, size_bytes: int) -> None:
        """Count an evaluation, before it is stored in the same transaction; raises Refused if it is over a limit."""
        usage, most = self._usage(device), self._limits.device_evaluations_per_hour
        self._check_bytes(device, usage)
        if usage.evaluations >= most:
            raise self._refusal(
                usage,
                f"{device} has uploaded {most} evaluations within an hour (limits.device_evaluations_per_hour)",
            )
        self._store.usages.put(device, usage.plus(evaluations=1, size_bytes=size_bytes))

    def _check_submission(self, device: str, digest: bytes, size_bytes: int) -> Usage:
        """Return the device's usage; raise Refused if a submission, in place of its previous one, is over a limit."""
        hourly = self._limits.uploads_per_hour
        if hourly is not None and (usage := self._usage(FLEET)).submissions >= hourly:
            raise self._refusal(
                usage, f"the fleet has uploaded {hourly} submissions within an hour (limits.uploads_per_hour)"
            )
        usage, most = self._usage(device), self._limits.submissions_of_device
        self._check_bytes(device, usage)
        if usage.submissions >= most:
            raise self._refusal(
                usage,
                f"{device} has uploaded {most} submissions within an hour (limits.device_submissions_per_hour)",
            )
        if (most_bytes := self._limits.max_storage_bytes) is not None:
            added, (_, stored) = self._added_bytes(device, digest, size_bytes), self._stored_bytes()
            if added > 0 and stored + added > most_bytes:
                raise Refused(
                    "quota",
                    f"the fleet stores {stored / _MIB:.1f} of {most_bytes / _MIB:g} MiB (limits.max_storage_mb), this "
                    f"would add {added / _MIB:.1f}: the operator may raise the quota, or forget devices",
                )
        return usage

    def _stored_bytes(self) -> tuple[int, int]:
        newest = self._store.submissions.deletions
        if self._stored is None or self._stored[0] != newest:
            self._stored = newest, self._store.submissions.stored_bytes()
        return self._stored

    def _added_bytes(self, device: str, digest: bytes, size_bytes: int) -> int:
        return self._store.submissions.added_bytes(self._task, device, digest=digest, size_bytes=size_bytes)

    def _check_bytes(self, device: str, usage: Usage) -> None:
        if usage.size_bytes >= self._limits.device_bytes_per_hour:
            text = f"{device} has uploaded {usage.size_bytes / _MIB:.1f} MiB within an hour (limits.device_mb_per_hour)"
            raise self._refusal(usage, text)

    def _usage(self, device: str) -> Usage:
        return self._store.usages.of(device, now_s=self._store.clock.now_s())

    def _refusal(self, usage: Usage, what: str) -> Refused:
        wait_s = usage.wait_s(self._store.clock.now_s())
        return Refused(
            "quota", f"{what}: the next one is accepted in {wait_s:.0f} s; the operator may raise the limit"
        )
