"""Features on disk, in SQLite, so that none is computed twice."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.store.disk_space import require_space
from protocol.errors import BackboneMismatch, StateError
from protocol.models.preprocessing import VERSION
from protocol.storage.database import Database

CHUNK_ROWS = 256
"""Features read at once."""

ROW_BYTES = 512
"""Bytes of a row beside its feature: image and backbone, in the table and in its index."""

OTHERS_MAX_AGE_S = 30 * 24 * 3600.0
"""How long the features of a backbone that is out of use are kept: a task may return to it."""

OTHERS_MAX_BYTES = 1024**3
"""Above this file size, features of backbones out of use are deleted at once, the oldest first."""

_SCHEMA = """
CREATE TABLE backbones (sha256 TEXT PRIMARY KEY, used_s REAL NOT NULL);
CREATE TABLE features (
    backbone TEXT NOT NULL, identity BLOB NOT NULL, vector BLOB, unusable TEXT, UNIQUE (backbone, identity)
);
CREATE TABLE contents (
    identity BLOB PRIMARY KEY, digest BLOB NOT NULL, preprocessing INTEGER NOT NULL
) WITHOUT ROWID;
-- Images, by the relative paths of the files that have other ones now.
CREATE TABLE replaced (path BLOB PRIMARY KEY, digest BLOB NOT NULL) WITHOUT ROWID;
"""

BASE_VERSION = 2
"""Schema version of an earlier program, whose features are computed again."""


class FeatureCache:
    """Features by backbone and image, why images are unusable, and digests of images; for one thread at a time.

    The SQLite file is created if it does not exist; a damaged one is renamed and created anew. With `read_only` it has
    to exist, and is not changed.

    Raises:
        StateError: the file cannot be written.
    """

    def __init__(
        self, file: Path, *, read_only: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        # Losing the last batches in a power loss is cheaper than waiting for the disk after each.
        pragmas = {"auto_vacuum": "INCREMENTAL", "synchronous": "NORMAL"}
        self._database = Database(
            file,
            program="edge-client",
            migrations=(_SCHEMA,),
            base=BASE_VERSION,
            read_only=read_only,
            is_cache=not read_only,
            pragmas=pragmas,
        )

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def known(self, *backbones: str) -> set[str]:
        """Return the identities of images whose features from all of these backbones are stored."""
        query = "SELECT identity FROM features WHERE backbone = ? AND vector IS NOT NULL"
        return set.intersection(
            *({_text(row[0]) for row in self._database.read(query, backbone)} for backbone in backbones)
        )

    def contents(self) -> dict[str, bytes]:
        """Return the stored digests of images by their identities."""
        rows = self._database.read("SELECT identity, digest FROM contents")
        return {_text(identity): digest for identity, digest in rows}

    def put_contents(self, digests: Mapping[str, bytes]) -> None:
        """Store digests of images by their identities; of a file that has one it stays."""
        with self._database.transaction() as database:
            rows = [(_key(identity), digest, VERSION) for identity, digest in digests.items()]
            database.executemany("INSERT OR IGNORE INTO contents VALUES (?, ?, ?)", rows)

    def of_earlier_preprocessing(self) -> set[str]:
        """Return the identities of images whose pixels an earlier version of the preprocessing made."""
        rows = self._database.read("SELECT identity FROM contents WHERE preprocessing < ?", VERSION)
        return {_text(row[0]) for row in rows}

    def renew(self, has_changed: Mapping[str, bool]) -> None:
        """Delete features and digests of images whose pixels are others now; note that the others are the same."""
        changed = [(_key(identity),) for identity, changes in has_changed.items() if changes]
        backbones = self._database.read("SELECT DISTINCT backbone FROM features")
        same = [(VERSION, _key(identity)) for identity, changes in has_changed.items() if not changes]
        with self._database.transaction() as database:
            for (backbone,) in backbones:
                rows = ((backbone, *key) for key in changed)
                database.executemany("DELETE FROM features WHERE backbone = ? AND identity = ?", rows)
            database.executemany("DELETE FROM contents WHERE identity = ?", changed)
            database.executemany("UPDATE contents SET preprocessing = ? WHERE identity = ?", same)

    def states(self, backbone: str) -> dict[str, str]:
        """Return "" for each image whose feature is stored, and the reason for each that is unusable."""
        query = "SELECT identity, ifnull(unusable, '') FROM features WHERE backbone = ?"
        return {_text(identity): reason for identity, reason in self._database.read(query, backbone)}

    def put(
        self,
        backbone: str,
        features: Iterable[tuple[str, NDArray[np.float32]]],
        unusable: Iterable[tuple[str, str]],
    ) -> None:
        """Store features (float32 (L,) each) and unusable images with reasons, all of them or none."""
        rows: list[tuple[str, bytes, bytes | None, str | None]] = [
            (backbone, _key(identity), vector.astype("<f4").tobytes(), None) for identity, vector in features
        ]
        rows += [(backbone, _key(identity), None, reason) for identity, reason in unusable]
        with self._database.transaction() as database:
            database.executemany("INSERT OR REPLACE INTO features VALUES (?, ?, ?, ?)", rows)

    def forget_unusable(self, *backbones: str) -> None:
        """Let images that are unusable for these backbones be tried again."""
        for backbone in backbones:
            self._database.write("DELETE FROM features WHERE backbone = ? AND vector IS NULL", backbone)

    def require_space(self, images: int, feature_size: int) -> None:
        """Raise DiskAlmostFull if the disk has too little space for the features of so many images."""
        needed_bytes = images * (4 * feature_size + ROW_BYTES)
        require_space(self._database.path.parent, needed_bytes, what=f"the features of {images} images")

    def chunks(self, identities: Sequence[str], *backbones: str) -> Iterator[NDArray[np.float32]]:
        """Yield features as `matrix` does, float32 (up to CHUNK_ROWS, L1 + ... + LK)."""
        for start in range(0, len(identities), CHUNK_ROWS):
            part = identities[start : start + CHUNK_ROWS]
            yield np.concatenate([self._vectors(part, backbone) for backbone in backbones], axis=1)

    def matrix(self, identities: Sequence[str], *backbones: str, size: int) -> NDArray[np.float32]:
        """Return features in the order of n identities, those of K backbones side by side, float32 (n, L1 + ... + LK).

        Nothing else takes memory in proportion to n. `size` is L1 + ... + LK.

        Raises:
            StateError: a feature is missing.
            BackboneMismatch: the backbones do not give `size` features.
        """
        features, done = np.empty((len(identities), size), np.float32), 0
        for chunk in self.chunks(identities, *backbones):
            if chunk.shape[1] != size:
                raise BackboneMismatch(
                    f"expected {size} features from {len(backbones)} backbones, got {chunk.shape[1]}"
                )
            features[done : done + len(chunk)] = chunk
            done += len(chunk)
        return features

    def stored_features(self, identities: Sequence[str], *backbones: str) -> dict[str, NDArray[np.float32]]:
        """Return the features, float32 (L1 + ... + LK,), of images by identity, without those that have none stored."""
        rows = [self._rows(identities, backbone) for backbone in backbones]
        found = {
            identity: np.frombuffer(b"".join(each[identity] for each in rows), dtype="<f4")
            for identity in identities
            if all(identity in each for each in rows)
        }
        if len({*map(len, found.values())}) > 1:
            raise self._changed()
        return found

    def _vectors(self, identities: Sequence[str], backbone: str) -> NDArray[np.float32]:
        """Return the features of at most CHUNK_ROWS images, float32 (n, L); raises StateError if one is missing."""
        rows = self._rows(identities, backbone)
        vectors = [rows.get(identity, b"") for identity in identities]
        if not all(vectors) or len({*map(len, vectors)}) > 1:
            raise self._changed()
        return np.frombuffer(b"".join(vectors), dtype="<f4").reshape(len(vectors), -1)

    def _rows(self, identities: Sequence[str], backbone: str) -> dict[str, bytes]:
        places = ", ".join("?" * len(identities))
        query = f"SELECT identity, vector FROM features WHERE backbone = ? AND identity IN ({places})"  # noqa: S608
        rows = self._database.read(query, backbone, *map(_key, identities))
        return {_text(identity): vector for identity, vector in rows if vector}

    def _changed(self) -> StateError:
        return StateError(f"{self._database.path} was changed while it was read: start again")

    def replaced(self) -> dict[str, bytes]:
        """Return digests of images by the relative paths of files that have other images now."""
        return {
            _text(path): digest for path, digest in self._database.read("SELECT path, digest FROM replaced")
        }

    def prune(
        self, identities: Iterable[str], *backbones: str, replaced: Mapping[str, str] | None = None
    ) -> None:
        """Delete features of images not in `identities`, and of other backbones long out of use or over the limit.

        `replaced` are the identities of images in whose files there are others now, by relative paths; their digests
        are noted until an image with the digest is found.
        """
        with self._database.connection() as database:
            database.execute("CREATE TEMP TABLE existing (identity BLOB PRIMARY KEY) WITHOUT ROWID")
            try:
                with self._database.transaction():
                    keys = ((_key(identity),) for identity in identities)
                    database.executemany("INSERT OR IGNORE INTO existing VALUES (?)", keys)
                    rows = ((_key(path), _key(identity)) for path, identity in (replaced or {}).items())
                    database.executemany(
                        "INSERT OR REPLACE INTO replaced SELECT ?, digest FROM contents WHERE identity = ?",
                        rows,
                    )
                    gone = [
                        database.execute(f"DELETE FROM {table} WHERE identity NOT IN existing").rowcount  # noqa: S608
                        for table in ("features", "contents")
                    ]
                    database.execute("DELETE FROM replaced WHERE digest IN (SELECT digest FROM contents)")
                    used = [(backbone, self._clock()) for backbone in backbones]
                    database.executemany("INSERT OR REPLACE INTO backbones VALUES (?, ?)", used)
            finally:
                database.execute("DROP TABLE temp.existing")
            for backbone, used_s in self._database.read("SELECT * FROM backbones ORDER BY used_s"):
                old = self._clock() - used_s > OTHERS_MAX_AGE_S
                if backbone not in backbones and (old or self._size_bytes() > OTHERS_MAX_BYTES):
                    with self._database.transaction():
                        database.execute("DELETE FROM features WHERE backbone = ?", (backbone,))
                        database.execute("DELETE FROM backbones WHERE sha256 = ?", (backbone,))
            # `execute` would free a single page.
            database.executescript("PRAGMA incremental_vacuum")
            if any(gone):
                self._database.empty_log()  # the features of a deleted image are nowhere

    def _size_bytes(self) -> int:
        ((pages, free, page_bytes),) = self._database.read(
            "SELECT page_count, freelist_count, page_size "
            "FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
        )
        return int((pages - free) * page_bytes)


def _key(identity: str) -> bytes:
    """File names are bytes on Linux, which text in SQLite cannot hold."""
    return identity.encode(errors="surrogateescape")


def _text(key: bytes) -> str:
    return key.decode(errors="surrogateescape")
