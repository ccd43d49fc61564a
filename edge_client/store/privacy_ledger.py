"""The record of all releases under differential privacy, written before an image is looked at or noise is drawn.

A state directory has one ledger, whatever task or folder of images a release was made of, so that the recorded privacy
loss is never below the actual one, unless the directory is restored from an older copy. The number of releases stands
in the database and in a file beside it: if the two disagree, one of them was lost, and the privacy loss is unknown.
"""

import math
from pathlib import Path

import msgspec

from edge_client.store.stored_values import PrivacySpent
from protocol.errors import PrivacyRefused
from protocol.storage.blobstore import state_errors, write_atomically
from protocol.storage.database import Database
from protocol.storage.facts import Facts

LOST = (
    "the record of what was spent on privacy is damaged or lost: nothing is uploaded until `edge-client adopt-spent` "
    "has repaired it"
)


class Release(msgspec.Struct, frozen=True):
    """One release, numbered from 1, with the fingerprint of the task and images that it is made of.

    Its noise is derived from `key` and `content`, the digest of the rows that the noise is for, which is None until
    they are known. `key` is None once the submission is in the outbox, and of all releases but the newest.
    `noise_multiplier` is for one row; `honest` devices have this noise together: 1 without a second operator, and 0 if
    an earlier version has made it. `images_per_person` images of one person count at most; None if all do.
    """

    number: int
    fingerprint: bytes
    noise_multiplier: float
    key: bytes | None
    content: bytes | None = None
    honest: int = 1
    images_per_person: int | None = None


_SELECT = f"SELECT {', '.join(Release.__struct_fields__)} FROM releases"  # noqa: S608 - names of this class
_INSERT = (
    f"INSERT INTO releases ({', '.join(Release.__struct_fields__)}) "  # noqa: S608
    f"VALUES ({', '.join('?' * len(Release.__struct_fields__))})"
)


class Ledger:
    """A device's releases, whose number is also in the file `marker`."""

    def __init__(self, database: Database, marker: Path) -> None:
        self._database = database
        self._marker = marker

    def is_empty(self) -> bool:
        """Return whether no release was ever recorded, as far as the folder shows."""
        return not (self._marker.exists() or Facts(self._database).get(PrivacySpent))

    def releases(self) -> tuple[Release, ...]:
        """Return all releases, the newest last.

        Raises:
            PrivacyRefused: some of them are lost.
            StateError: the disk fails.
        """
        releases = tuple(Release(*row) for row in self._database.read(f"{_SELECT} ORDER BY number"))
        count = len(releases)
        is_sound = all(map(_is_sound, releases)) and [each.number for each in releases] == [
            *range(1, count + 1)
        ]
        # The marker is written after the row: a power loss in between leaves it one behind.
        is_marked = self._marked() in {count, count - 1}
        spent = Facts(self._database).get(PrivacySpent) or PrivacySpent()
        if not (is_sound and is_marked and spent.releases == count):
            raise PrivacyRefused(LOST)
        return releases

    def charge(self, release: Release, spent: PrivacySpent) -> None:
        """Record a release durably, before it is made, and delete the noise keys of earlier ones.

        Raises:
            StateError: the disk is full or fails.
        """
        values = msgspec.structs.astuple(release)
        if self._marked() != release.number - 1:  # one behind since a power loss: it must not become two
            write_atomically(self._marker, b"%d\n" % (release.number - 1))
        with self._database.transaction() as database:
            database.execute("UPDATE releases SET key = NULL")
            database.execute(_INSERT, values)
            Facts(self._database).put(spent)
        write_atomically(self._marker, b"%d\n" % release.number)

    def left(self) -> tuple[Release, ...]:
        """Return the releases that can be read, numbered anew, without their keys: those of a damaged ledger."""
        rows = (Release(*row) for row in self._database.read(f"{_SELECT} ORDER BY number"))
        return tuple(
            msgspec.structs.replace(each, number=number, key=None)
            for number, each in enumerate(filter(_is_sound, rows), 1)
        )

    def replace(self, releases: tuple[Release, ...], spent: PrivacySpent) -> None:
        """Record releases in place of all others.

        Raises:
            StateError: the disk is full or fails.
        """
        with self._database.transaction() as database:
            database.execute("DELETE FROM releases")
            database.executemany(_INSERT, map(msgspec.structs.astuple, releases))
            Facts(self._database).put(spent)
        write_atomically(self._marker, b"%d\n" % len(releases))

    def bind(self, number: int, content: bytes) -> None:
        """Record durably which features a release's noise is for, before it is made.

        Raises:
            StateError: the disk is full or fails.
        """
        with self._database.transaction() as database:
            database.execute("UPDATE releases SET content = ? WHERE number = ?", (content, number))

    def _marked(self) -> int:
        if not self._marker.exists():
            return 0
        with state_errors(self._marker):
            text = self._marker.read_bytes().strip()
        return int(text) if text.isdigit() else -2


def _is_sound(release: Release) -> bool:
    return math.isfinite(release.noise_multiplier) and release.noise_multiplier > 0
