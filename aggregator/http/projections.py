"""The projection of all prototypes: one for each set of submissions, shared by all requests."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from aggregator.http.documents import Document, make_document
from aggregator.status.projection import Sources, project, projection_sources
from aggregator.storage.open_store import open_store


class Projections:
    """Projects the prototypes of a state directory when a request asks and the submissions have changed."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._lock = asyncio.Lock()
        self._sources: Sources | None = None
        self._document: Document | None = None

    async def current(self) -> Document:
        """Return the projection; raises StateError if the state cannot be read."""
        async with self._lock:
            sources, read = await asyncio.to_thread(self._read)
            if self._document is None or sources != self._sources:
                projection = await asyncio.to_thread(project, read, sources)
                self._document, self._sources = make_document(projection), sources
            return self._document

    def _read(self) -> tuple[Sources, Callable[[bytes], bytes]]:
        with contextlib.closing(open_store(self._state, read_only=True)) as store:
            return projection_sources(store), store.blob_reader()
