"""What a device has ever released of its images, on the disk: whoever draws noise has paid for it before.

One state folder has one ledger, whatever task or folder of images a release was of: what was spent is never less than
what it says. It stands in the database, and how many releases there were in a file beside it as well. Where the two do
not fit each other, one of them was lost, and nobody knows what was spent.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.storage.database import Database, write_facts
from protocol.errors import PrivacyRefused
from protocol.storage.blobstore import state_errors, write_atomically

LOST = "the record of what was spent on privacy is damaged or lost: nothing is uploaded"


@dataclass(frozen=True)
class Release:
    """One release.

    Args:
        number: from 1.
        fingerprint: of all that it was made of.
        noise_multiplier: of all of it together.
        key: what its noise follows from; of the newest release only.
    """

    number: int
    fingerprint: bytes
    noise_multiplier: float
    key: bytes | None


class Ledger:
    """The releases of one device.

    Args:
        database: where they are.
        marker: the file that says how many there were.
    """

    def __init__(self, database: Database, marker: Path) -> None:
        self._database = database
        self._marker = marker

    def releases(self) -> tuple[Release, ...]:
        """All there were, the newest last.

        Raises:
            PrivacyRefused: some of them are lost.
            StateError: the disk does not give them.
        """
        rows = self._database.read(
            "SELECT number, fingerprint, noise_multiplier, key FROM releases ORDER BY number"
        )
        releases = tuple(Release(*row) for row in rows)
        known = self._database.get("privacy", {}).get("releases", 0)
        sound = [release.number for release in releases] == list(range(1, len(releases) + 1))
        sound = sound and all(
            math.isfinite(one.noise_multiplier) and one.noise_multiplier > 0 for one in releases
        )
        # The file is written after the row: power that goes off in between leaves it one behind.
        if not (sound and known == len(releases) and self._marked() in {len(releases), len(releases) - 1}):
            raise PrivacyRefused(LOST)
        return releases

    def charge(self, release: Release, spent: Mapping[str, Any]) -> None:
        """Write a release down, for good, before it is made; the keys of those before it are forgotten.

        Args:
            release: the next one.
            spent: what is shown of all releases, this one included, `releases` among it.

        Raises:
            StateError: the disk does not take it.
        """
        values = (release.number, release.fingerprint, release.noise_multiplier, release.key)
        with self._database.transaction() as database:
            database.execute("UPDATE releases SET key = NULL")
            database.execute("INSERT INTO releases VALUES (?, ?, ?, ?)", values)
            write_facts(database, {"privacy": dict(spent)})
        write_atomically(self._marker, b"%d\n" % release.number)

    def _marked(self) -> int:
        if not self._marker.exists():
            return 0
        with state_errors(self._marker):
            text = self._marker.read_bytes().strip()
        return int(text) if text.isdigit() else -2


def multipliers(releases: tuple[Release, ...]) -> Counter[float]:
    """How many releases there were of each noise multiplier."""
    return Counter(release.noise_multiplier for release in releases)
