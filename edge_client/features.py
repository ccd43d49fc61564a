"""Pictures to features, each of them once: decoded ahead of ONNX Runtime, kept in SQLite over restarts.

Memory holds two batches of pictures, whatever their number; features are streamed back from the disk.
"""

import contextlib
import itertools
import logging
import sqlite3
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.backbone import Backbone
from edge_client.images import Picture, decode
from protocol.errors import ProtofleetError, StateError, UnreadablePicture
from protocol.preprocessing import Preprocessing, preprocess

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS features (
    backbone TEXT NOT NULL, identity TEXT NOT NULL, vector BLOB, refused TEXT, UNIQUE (backbone, identity)
) STRICT;
"""
_CHUNK_ROWS = 256


class Interrupted(ProtofleetError):
    """Extraction was asked to stop; what was computed is kept."""


@dataclass(frozen=True)
class Extraction:
    """How an extraction went.

    Args:
        computed: pictures whose features were computed now.
        cached: pictures whose features were known.
        refused: pictures that cannot be used, and why.
    """

    computed: int
    cached: int
    refused: tuple[tuple[Path, str], ...]


class FeatureCache:
    """Features on disk, by backbone and picture.

    Args:
        file: an SQLite file, made if it is not there; one that is damaged is put aside and begun anew.

    Raises:
        StateError: the file cannot be written.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise StateError(f"cannot use {file}: {error}") from error
            damaged = file.with_suffix(".damaged")
            log.warning("%s is damaged (%s); it is put aside as %s", file, error, damaged.name)
            with contextlib.suppress(OSError):
                file.replace(damaged)
            with self._errors():
                self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        # One thread at a time uses it, though not always the one that opened it.
        database = sqlite3.connect(self._file, isolation_level=None, timeout=10, check_same_thread=False)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(_SCHEMA)
        return database

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StateError(f"cannot use {self._file}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def known(self, backbone: str) -> set[str]:
        """Identities of the pictures whose features are there."""
        with self._errors():
            rows = self._db.execute(
                "SELECT identity FROM features WHERE backbone = ? AND vector IS NOT NULL", (backbone,)
            )
            return {identity for (identity,) in rows}

    def refused(self, backbone: str) -> dict[str, str]:
        """Identities of the pictures that could not be used, and why."""
        with self._errors():
            rows = self._db.execute(
                "SELECT identity, refused FROM features WHERE backbone = ? AND refused IS NOT NULL",
                (backbone,),
            )
            return dict(rows)

    def put(
        self,
        backbone: str,
        features: Iterable[tuple[str, NDArray[np.float32]]],
        refused: Iterable[tuple[str, str]],
    ) -> None:
        """Keep features (float32 (L,) each) and refusals, all of them or none."""
        rows: list[tuple[str, str, bytes | None, str | None]] = [
            (backbone, identity, vector.astype("<f4").tobytes(), None) for identity, vector in features
        ]
        rows += [(backbone, identity, None, reason) for identity, reason in refused]
        with self._errors():
            self._db.execute("BEGIN")
            try:
                self._db.executemany("INSERT OR REPLACE INTO features VALUES (?, ?, ?, ?)", rows)
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise

    def chunks(self, identities: Sequence[str], backbone: str) -> Iterator[NDArray[np.float32]]:
        """Features in the order of `identities`, float32 (up to 256, L) at a time.

        Raises:
            StateError: features that were there are gone.
        """
        for start in range(0, len(identities), _CHUNK_ROWS):
            part = identities[start : start + _CHUNK_ROWS]
            marks = ",".join("?" * len(part))
            with self._errors():
                rows = self._db.execute(
                    f"SELECT identity, vector FROM features WHERE backbone = ? AND identity IN ({marks})",  # noqa: S608
                    (backbone, *part),
                )
                vectors = {
                    identity: np.frombuffer(vector, dtype="<f4") for identity, vector in rows if vector
                }
            if any(identity not in vectors for identity in part):
                raise StateError(f"{self._file} was changed while it was read: start again")
            yield np.stack([vectors[identity] for identity in part])

    def keep_only(self, identities: Collection[str], backbone: str) -> None:
        """Forget pictures that are gone, and what other backbones made of any."""
        with self._errors():
            self._db.execute("DELETE FROM features WHERE backbone != ?", (backbone,))
            rows = self._db.execute("SELECT identity FROM features").fetchall()
            gone = [(identity,) for (identity,) in rows if identity not in identities]
            self._db.execute("BEGIN")
            self._db.executemany("DELETE FROM features WHERE identity = ?", gone)
            self._db.execute("COMMIT")


def extract(
    pictures: Sequence[Picture],
    backbone: Backbone,
    cache: FeatureCache,
    *,
    batch_size: int,
    workers: int,
    on_progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> Extraction:
    """Compute the features that the cache has not got.

    Args:
        pictures: all of the device's pictures; the cache forgets every other one.
        backbone: what computes.
        cache: where the features go.
        batch_size: pictures in one run of the backbone.
        workers: threads that decode and preprocess.
        on_progress: called with the number of pictures done and of all.
        should_stop: asked before every run.

    Raises:
        Interrupted: `should_stop` said so.
        StateError: the features cannot be kept.
    """
    cache.keep_only({picture.identity for picture in pictures}, backbone.sha256)
    known, refused = cache.known(backbone.sha256), cache.refused(backbone.sha256)
    todo = [p for p in pictures if p.identity not in known and p.identity not in refused]
    done = len(pictures) - len(todo)
    cached = len(known)
    on_progress(done, len(pictures))
    for batch in _decoded(todo, backbone.metadata.preprocessing, batch_size=batch_size, workers=workers):
        if should_stop():
            raise Interrupted("extraction was interrupted")
        features, reasons = _compute(backbone, batch)
        cache.put(backbone.sha256, features, reasons)
        refused.update(reasons)
        done += len(batch)
        on_progress(done, len(pictures))
    bad = tuple((p.path, refused[p.identity]) for p in pictures if p.identity in refused)
    return Extraction(computed=len(pictures) - cached - len(bad), cached=cached, refused=bad)


_Decoded = tuple[Picture, NDArray[np.uint8] | str]


def _decoded(
    pictures: Sequence[Picture], spec: Preprocessing, *, batch_size: int, workers: int
) -> Iterator[list[_Decoded]]:
    """Batches of pictures, uint8 (H, W, 3) each or the reason why not; at most two batches are ahead."""
    waiting: deque[Future[_Decoded]] = deque()
    ahead = iter(pictures)
    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        try:
            while True:
                more = itertools.islice(ahead, 2 * batch_size - len(waiting))
                waiting.extend(pool.submit(_prepare, picture, spec) for picture in more)
                if not waiting:
                    return
                yield [waiting.popleft().result() for _ in range(min(batch_size, len(waiting)))]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _prepare(picture: Picture, spec: Preprocessing) -> _Decoded:
    try:
        return picture, preprocess(decode(picture.path), spec)
    except UnreadablePicture as error:
        return picture, str(error).removeprefix(f"{picture.path}: ")


def _compute(
    backbone: Backbone, batch: Sequence[_Decoded]
) -> tuple[list[tuple[str, NDArray[np.float32]]], list[tuple[str, str]]]:
    """Features of what could be decoded; what is not finite is refused."""
    refused = [(picture.identity, pixels) for picture, pixels in batch if isinstance(pixels, str)]
    good = [(picture.identity, pixels) for picture, pixels in batch if not isinstance(pixels, str)]
    if not good:
        return [], refused
    vectors = backbone.features(np.stack([pixels for _, pixels in good]))
    features = []
    for (identity, _), vector in zip(good, vectors, strict=True):
        if np.isfinite(vector).all():
            features.append((identity, vector))
        else:
            refused.append((identity, "the backbone gives NaN or infinity for it"))
    return features, refused
