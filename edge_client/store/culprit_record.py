"""The record of what has ended jobs: graphs and heads by their deaths in a row, and images."""

from edge_client.store.culprits import MAX_DEATHS
from protocol.storage.database import Database

MAX_ROWS = 64
"""Graphs and heads that are kept, the newest; those of replaced tasks and heads are never deleted otherwise."""

MAX_IMAGES = 1000
"""Images that are kept, the newest."""


class CulpritRecord:
    """The deaths that a device's jobs died of."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def deaths(self) -> dict[str, int]:
        """Return the deaths in a row by a digest in hex, since the graphs or the head last worked."""
        return {
            digest.hex(): deaths
            for digest, deaths in self._database.read("SELECT digest, deaths FROM deaths")
        }

    def add_death(self, digest: bytes) -> None:
        """Count a death."""
        with self._database.transaction() as database:
            place = "(SELECT coalesce(max(place), 0) + 1 FROM deaths)"
            database.execute(
                f"INSERT INTO deaths VALUES (?, 1, {place}) "  # noqa: S608
                f"ON CONFLICT (digest) DO UPDATE SET deaths = deaths + 1, place = {place}",
                (digest,),
            )
            database.execute(
                "DELETE FROM deaths WHERE place <= (SELECT max(place) FROM deaths) - ?", (MAX_ROWS,)
            )

    def refuse(self, digest: bytes) -> None:
        """Let a head that failed in use be refused when it is offered again."""
        for _ in range(MAX_DEATHS):
            self.add_death(digest)

    def forget(self, digest: bytes) -> None:
        """Note that something has worked."""
        self._database.write("DELETE FROM deaths WHERE digest = ?", digest)

    def guilty(self) -> dict[bytes, int]:
        """Return the images at which jobs ended, with the memory that these might use, bytes."""
        return dict(self._database.read("SELECT image, memory_bytes FROM guilty_images"))

    def convict(self, image: bytes, *, memory_bytes: int) -> None:
        """Record that a job ended while it decoded one image."""
        with self._database.transaction() as database:
            database.execute("INSERT OR REPLACE INTO guilty_images VALUES (?, ?)", (image, memory_bytes))
            database.execute(
                "DELETE FROM guilty_images WHERE rowid <= (SELECT max(rowid) FROM guilty_images) - ?",
                (MAX_IMAGES,),
            )
