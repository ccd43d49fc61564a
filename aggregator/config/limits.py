"""The table `[limits]` of the task file."""

from typing import Annotated

import msgspec
from msgspec import Meta


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`[limits]`: how much work devices may cause, and how many of their heads are kept."""

    heads_per_hour: Annotated[int, Meta(ge=1, le=3600)] = 12
    """Trainings, however often devices upload. As many at once after a pause.

    Submissions that arrive meanwhile are in the next head. A revocation starts a training at any time.
    """
    downloads_per_hour: Annotated[int, Meta(ge=1, le=3600)] = 4
    """Downloads of each blob by a device. As many at once after a pause.

    A blob is a backbone, a graph or a head. One below 256 KiB counts as one of 256 KiB.
    """
    kept_heads: Annotated[int, Meta(ge=10, le=1_000_000)] = 200
    """Newest heads in `status`. Older ones are deleted, except those in use and those that a rollback can return to."""
    max_devices: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(examples=[1000])] = None
    """Quota of the whole fleet: devices with a valid key."""
    max_storage_mb: Annotated[Annotated[float, Meta(gt=0, le=1e9)] | None, Meta(examples=[4096])] = None
    """Quota: MiB of all submissions."""
    uploads_per_hour: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(examples=[6000])] = None
    """Quota: accepted submissions of all devices."""
    device_submissions_per_hour: Annotated[int, Meta(ge=1)] = 1000
    """Accepted submissions of one device; at most half of `uploads_per_hour`."""
    device_evaluations_per_hour: Annotated[int, Meta(ge=1)] = 1000
    """Accepted evaluations of one device."""
    device_mb_per_hour: Annotated[float, Meta(gt=0, le=1e9)] = 4096.0
    """MiB of accepted uploads of one device; the upload that exceeds it is the last one."""

    @property
    def max_storage_bytes(self) -> int | None:
        return None if self.max_storage_mb is None else int(self.max_storage_mb * 1024**2)

    @property
    def submissions_of_device(self) -> int:
        """Submissions of one device in an hour: never all of the fleet's, unless that is one."""
        hourly = self.uploads_per_hour
        most = self.device_submissions_per_hour
        return most if hourly is None else min(most, max(1, hourly // 2))

    @property
    def device_bytes_per_hour(self) -> int:
        return int(self.device_mb_per_hour * 1024**2)
