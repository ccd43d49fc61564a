"""Features on the disk, in SQLite: what was computed once is not computed again after a restart."""

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import BackboneMismatch, StateError
from protocol.storage.blobstore import state_errors

log = logging.getLogger(__name__)

CHUNK_ROWS = 256
"""Features read at once."""

OTHERS_MAX_AGE_S = 30 * 24 * 3600.0
"""So long the features of a backbone that is out of use are kept: a task may come back to it."""

OTHERS_MAX_BYTES = 1024**3
"""Above this size of the file, backbones that are out of use are forgotten at once, the oldest first."""

_VERSION = 1
_SCHEMA = f"""
DROP TABLE IF EXISTS features;
DROP TABLE IF EXISTS backbones;
CREATE TABLE backbones (sha256 TEXT PRIMARY KEY, used_s REAL NOT NULL);
CREATE TABLE features (
    backbone TEXT NOT NULL, identity BLOB NOT NULL, vector BLOB, refused TEXT, UNIQUE (backbone, identity)
);
PRAGMA user_version = {_VERSION};
"""


class FeatureCache:
    """Features on disk, by backbone and image; also why an image cannot be used.

    One thread at a time may use it. Of another version than ours, it is begun anew: it is but a cache.

    Args:
        file: an SQLite file, made if it is not there; one that is damaged is put aside and begun anew.
        clock: gives the time, in seconds since 1970.

    Raises:
        StateError: the file cannot be written.
    """

    def __init__(self, file: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock = clock
        with self._errors():
            try:
                self._db = _open(file)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._db = self._begin_anew()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def known(self, *backbones: str) -> set[str]:
        """Identities of the images whose features from all of these backbones are there."""
        return set.intersection(*map(self._known, backbones))

    def _known(self, backbone: str) -> set[str]:
        rows = self._read(
            "SELECT identity FROM features WHERE backbone = ? AND vector IS NOT NULL", (backbone,)
        )
        return {_text(identity) for (identity,) in rows}

    def lookup(self, identity: str, backbone: str) -> str | None:
        """What is known of an image: "" if its feature is there, why it is refused, or None if nothing."""
        rows = self._read(
            "SELECT refused FROM features WHERE backbone = ? AND identity = ?", (backbone, _key(identity))
        )
        return (rows[0][0] or "") if rows else None

    def put(
        self,
        backbone: str,
        features: Iterable[tuple[str, NDArray[np.float32]]],
        refused: Iterable[tuple[str, str]],
    ) -> None:
        """Keep features (float32 (L,) each) and refusals, all of them or none."""
        rows: list[tuple[str, bytes, bytes | None, str | None]] = [
            (backbone, _key(identity), vector.astype("<f4").tobytes(), None) for identity, vector in features
        ]
        rows += [(backbone, _key(identity), None, reason) for identity, reason in refused]
        with self._errors(), self._db:
            self._db.executemany("INSERT OR REPLACE INTO features VALUES (?, ?, ?, ?)", rows)

    def chunks(self, identities: Sequence[str], *backbones: str) -> Iterator[NDArray[np.float32]]:
        """Features in the order of `identities`, those of the backbones one after the other.

        Yields:
            float32 (up to CHUNK_ROWS, L1 + ... + LK).

        Raises:
            StateError: features that were there are gone.
        """
        for start in range(0, len(identities), CHUNK_ROWS):
            part = identities[start : start + CHUNK_ROWS]
            size = sum(len(self._vector(part[0], backbone)) for backbone in backbones)
            yield self.matrix(part, *backbones, size=size)

    def matrix(self, identities: Sequence[str], *backbones: str, size: int) -> NDArray[np.float32]:
        """All features at once, in the order of `identities`, those of the backbones one after the other.

        Args:
            identities: of n images.
            backbones: K of them.
            size: L1 + ... + LK.

        Returns:
            float32 (n, size); nothing beside it takes memory in proportion to n.

        Raises:
            StateError: features that were there are gone.
            BackboneMismatch: the backbones do not give `size` features.
        """
        features = np.empty((len(identities), size), np.float32)
        for identity, row in zip(identities, features, strict=True):
            parts = [self._vector(identity, backbone) for backbone in backbones]
            if sum(map(len, parts)) != size:
                raise BackboneMismatch(
                    f"expected {size} features from {len(parts)} backbones, got {sum(map(len, parts))}"
                )
            np.concatenate(parts, out=row)
        return features

    def _vector(self, identity: str, backbone: str) -> NDArray[np.float32]:
        rows = self._read(
            "SELECT vector FROM features WHERE backbone = ? AND identity = ?", (backbone, _key(identity))
        )
        if not rows or rows[0][0] is None:
            raise StateError(f"{self._file} was changed while it was read: start again")
        return np.frombuffer(rows[0][0], dtype="<f4")

    def prune(self, identities: Iterable[str], *backbones: str) -> None:
        """Forget images that are gone, and backbones long out of use or in the way.

        Args:
            identities: of all images that there are.
            backbones: those in use.
        """
        with self._errors():
            self._forget_images(identities)
            with self._db:
                self._db.executemany(
                    "INSERT OR REPLACE INTO backbones VALUES (?, ?)",
                    [(backbone, self._clock()) for backbone in backbones],
                )
            for backbone, used_s in self._read("SELECT sha256, used_s FROM backbones ORDER BY used_s"):
                old = self._clock() - used_s > OTHERS_MAX_AGE_S
                if backbone not in backbones and (old or self._size_bytes() > OTHERS_MAX_BYTES):
                    with self._db:
                        self._db.execute("DELETE FROM features WHERE backbone = ?", (backbone,))
                        self._db.execute("DELETE FROM backbones WHERE sha256 = ?", (backbone,))
            self._db.executescript("PRAGMA incremental_vacuum")

    def _forget_images(self, identities: Iterable[str]) -> None:
        self._db.execute("DROP TABLE IF EXISTS temp.there")
        self._db.execute("CREATE TEMP TABLE there (identity BLOB PRIMARY KEY) WITHOUT ROWID")
        with self._db:
            self._db.executemany(
                "INSERT OR IGNORE INTO there VALUES (?)", ((_key(name),) for name in identities)
            )
            self._db.execute("DELETE FROM features WHERE identity NOT IN there")
        self._db.execute("DROP TABLE temp.there")

    def _size_bytes(self) -> int:
        ((pages, free, page_bytes),) = self._read(
            "SELECT page_count, freelist_count, page_size "
            "FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
        )
        return int((pages - free) * page_bytes)

    def _read(self, query: str, values: Sequence[str | bytes] = ()) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._db.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if not _is_damage(error):
                raise StateError(f"cannot use {self._file}: {error}") from error
            self._db.close()
            self._db = self._begin_anew()
            raise StateError(f"{self._file} was damaged and has been begun anew: start again") from error

    def _begin_anew(self) -> sqlite3.Connection:
        aside = self._file.with_suffix(".damaged")
        log.warning("%s is damaged: put aside as %s; features are computed anew", self._file, aside.name)
        with state_errors(self._file):
            for belonging in ("-wal", "-shm"):
                self._file.with_name(self._file.name + belonging).unlink(missing_ok=True)
            self._file.replace(aside)
        return _open(self._file)


def _open(file: Path) -> sqlite3.Connection:
    database = sqlite3.connect(file, timeout=10, check_same_thread=False)
    database.execute("PRAGMA auto_vacuum = INCREMENTAL")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    if database.execute("PRAGMA user_version").fetchone() != (_VERSION,):
        database.executescript(_SCHEMA)
    return database


def _is_damage(error: sqlite3.Error) -> bool:
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def _key(identity: str) -> bytes:
    """File names are bytes on Linux, which text in SQLite could not hold."""
    return identity.encode(errors="surrogateescape")


def _text(key: bytes) -> str:
    return key.decode(errors="surrogateescape")
