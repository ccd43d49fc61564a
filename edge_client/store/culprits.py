"""Culprits: a job names on its pipe what it runs before it does, so that its death has one."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Literal

from edge_client.store.job_folder import At, Decoded, FromJob, Worked
from protocol.errors import CrashedBefore, ProtofleetError
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import TaskManifest

MAX_DEATHS = 3
"""Deaths of jobs in a row after which something is not run again."""


def task_key(manifest: TaskManifest, *, purpose: Literal["build", "install"] = "build") -> bytes:
    """Return the digest by which a task's graphs are counted, which may work for one purpose only."""
    return digest_of(encode(manifest) + purpose.encode())


class Culprits:
    """Names what a job runs, and refuses what has ended jobs before.

    Args:
        send: sends a message to the service.
        deaths: deaths by digest in hex, since it last worked.
        suspects: identities of images that were being decoded when a job ended.
        guilty: identities of images at which jobs ended while they decoded nothing else, with the memory of these jobs.
    """

    def __init__(
        self,
        send: Callable[[FromJob], None] = lambda _: None,
        *,
        deaths: Mapping[str, int] | None = None,
        suspects: Collection[bytes] = (),
        guilty: Mapping[bytes, int] | None = None,
    ) -> None:
        self._send, self._deaths = send, deaths or {}
        self.suspects, self._guilty = frozenset(suspects), dict(guilty or {})
        self._at = At()

    @contextlib.contextmanager
    def running(self, digest: bytes, *, what: str, max_deaths: int | None = MAX_DEATHS) -> Iterator[None]:
        """Name what the body runs.

        Raises:
            CrashedBefore: it has ended `max_deaths` jobs; with None it is run however many it has ended.
        """
        deaths = self._deaths.get(digest.hex(), 0)
        if max_deaths is not None and deaths >= max_deaths:
            jobs = "a job" if deaths == 1 else f"{deaths} jobs"
            raise CrashedBefore(f"{jobs} ended while running {what}")
        before = self._at
        self._name(At(digest))
        try:
            yield
        except ProtofleetError:
            self._name(before)
            raise  # any other error ends the job, and counts
        if deaths:
            self._send(Worked(digest))
        self._name(before)

    def stored(self) -> None:
        """Note that results are on disk: what ends the job later is counted anew."""
        if self._at.what and self._deaths.get(self._at.what.hex()):
            self._send(Worked(self._at.what))

    def decoding(self, identities: Collection[str], memory_bytes: int) -> None:
        """Name the images that may be being decoded from now on."""
        images = tuple(identity.encode(errors="surrogateescape") for identity in identities)
        self._name(At(self._at.what, images, memory_bytes))

    def decoded(self, identity: str) -> None:
        """Note that a suspect was decoded."""
        self._send(Decoded(identity.encode(errors="surrogateescape")))

    def memory_at(self, identity: str) -> int:
        """Return the memory of the jobs that ended at an image, bytes; 0 if none did."""
        return self._guilty.get(identity.encode(errors="surrogateescape"), 0)

    def _name(self, at: At) -> None:
        if at != self._at:
            self._at = at
            self._send(at)
