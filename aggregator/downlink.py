"""Blobs going out to devices, piece by piece from the disk."""

from collections.abc import Iterator
from pathlib import Path

from protocol.blobstore import state_errors
from protocol.messages import PROTOCOL_VERSION, BlobRequest, Frame


def read_frames(path: Path, request: BlobRequest, *, chunk_bytes: int) -> Iterator[Frame]:
    """The bytes of a blob that a device asked for, as far as there are any, in frames of at most `chunk_bytes`.

    Raises:
        StateError: the blob cannot be read.
    """
    with state_errors(path), path.open("rb") as file:
        size = path.stat().st_size
        file.seek(request.offset)
        while (left := request.offset + request.length - file.tell()) > 0:
            offset = file.tell()
            data = file.read(min(chunk_bytes, left))
            if not data:
                return
            yield Frame(v=PROTOCOL_VERSION, digest=request.digest, size_bytes=size, offset=offset, data=data)
