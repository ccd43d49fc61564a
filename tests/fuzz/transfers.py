"""Frames of any content in any order, from several devices at once, compared with a model that stores single bytes."""

import contextlib
import functools
import shutil
from atexit import register
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

from aggregator.intake.open_uploads import MAX_RANGES, Key, OpenUploads
from aggregator.intake.upload import PIECE_BYTES, STRETCH_BYTES, UPLOAD_BYTES, Upload
from aggregator.intake.validation import Refused
from protocol.errors import TransferError
from protocol.wire.codec import digest_of
from protocol.wire.messages import PROTOCOL_VERSION, Frame, Receipt
from protocol.wire.transfer import Ranges
from tests.fuzz.target import Target

PAYLOADS = {size: bytes(at * 7 % 251 for at in range(size)) for size in range(256)}
DIGESTS = {size: digest_of(payload) for size, payload in PAYLOADS.items()}


def _operations(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data) - size + 1, size))


def _ranges(there: set[int]) -> Ranges:
    found: list[tuple[int, int]] = []
    for at in sorted(there):
        if found and found[-1][1] == at:
            found[-1] = (found[-1][0], at + 1)
        else:
            found.append((at, at + 1))
    return tuple(found)


def _frame(size: int, offset: int, length: int, kind: int) -> Frame:
    """Return a frame of a payload; bits of `kind` make data, digest or size incorrect."""
    data = PAYLOADS[size][offset : offset + length] if kind & 7 else bytes(length)
    digest = DIGESTS[size] if kind & 24 else bytes(32)
    announced = size if kind & 96 else size + 1
    return Frame(v=PROTOCOL_VERSION, digest=digest, size_bytes=announced, offset=offset, data=data)


@functools.cache
def _folder() -> Path:
    """Return a folder that is deleted at the end of the process."""
    folder = Path(mkdtemp(prefix="fuzz-uploads-"))
    register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def add_frames(data: bytes) -> None:
    """Add any frames to an upload: it stores the same bytes as the model, and returns the payload or refuses it."""
    if not data:
        return
    size = data[0]
    upload = Upload(DIGESTS[size], size, path=_folder() / "upload")
    there: dict[int, int] = {}
    for kind, offset, length in _operations(data[1:], 3):
        if kind == 0xFF:
            upload.flush()
            continue
        frame = _frame(size, offset, length, kind)
        try:
            upload.add(frame)
        except TransferError:
            continue
        assert offset + len(frame.data) <= size
        for at, value in enumerate(frame.data, offset):
            there.setdefault(at, value)
    assert upload.received_bytes == len(there)
    assert upload.missing() == _ranges(set(range(size)) - there.keys())
    try:
        payload = upload.payload()
    except TransferError:
        assert bytes(there.get(at, -1) % 256 for at in range(size)) != PAYLOADS[size] or len(there) < size
    else:
        assert payload == PAYLOADS[size]


LIMITS = {
    "max_bytes": 200,
    "per_device": 2,
    "max_upload_memory_bytes": UPLOAD_BYTES + 2 * PIECE_BYTES,
    "max_memory_bytes": 6 * UPLOAD_BYTES + 4 * PIECE_BYTES,
    "max_file_bytes": 3 * STRETCH_BYTES,
}

DISK_BYTES = 10_000


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def take_frames(data: bytes) -> None:
    """Take any frames: limits hold, a payload is the announced one, and nothing but `Refused` is raised."""
    complete: set[Key] = set()

    def started() -> OpenUploads:
        folder = _folder() / "open"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return OpenUploads(
            folder=folder,
            holds=lambda *key: key in complete,
            room=lambda: DISK_BYTES - _bytes(folder),
            **LIMITS,
        )

    uploads = started()
    for now, (kind, number, size, offset, length) in enumerate(_operations(data, 5)):
        device = f"device-{number % 8}"
        if kind == 0xFF:
            uploads = started()
        elif kind >= 0xF8:
            uploads.drop_device(device)
        elif kind >= 0xF0:
            uploads.expire(now - 20.0)
        if kind >= 0xF0:
            continue
        frame = _frame(size, offset, length, kind)
        with contextlib.suppress(Refused):
            answer = uploads.take(device, frame, now_s=float(now))
            if isinstance(answer, bytes):
                assert answer == PAYLOADS[frame.size_bytes]
                complete.add((device, frame.digest))
            elif isinstance(answer, Receipt):
                assert len(answer.missing) <= MAX_RANGES
                assert all(0 <= start < stop <= frame.size_bytes for start, stop in answer.missing)
        check_limits(uploads)
    files = {file.name for file in uploads.folder.iterdir()}
    assert files == {
        f"{device}-{digest.hex()}" for (device, digest), each in uploads._uploads.items() if each.size.file
    }


def check_limits(uploads: OpenUploads) -> None:
    """Assert that the uploads are within their limits, and counted as they are."""
    held = [*uploads._uploads.values()]
    assert uploads._memory_bytes == sum(each.size.memory for each in held)
    assert uploads._all_file_bytes == sum(each.size.file for each in held) <= uploads.max_file_bytes
    assert uploads._announced_bytes == sum(UPLOAD_BYTES + each.size_bytes for each in held)
    assert uploads._written_bytes == sum(each.size.written for each in held)
    assert uploads._file_bytes.total() == uploads._all_file_bytes
    in_memory = [each for each in held if each.size.memory > UPLOAD_BYTES]
    assert uploads._memory_bytes <= uploads.max_memory_bytes or not in_memory
    assert all(each.size.memory <= uploads.max_upload_memory_bytes for each in held)
    assert all(each.size_bytes <= uploads.max_bytes for each in held)
    owners = [device for device, _ in uploads._uploads]
    assert all(owners.count(device) <= uploads.per_device for device in owners)


UPLOAD = Target(
    "upload",
    add_frames,
    lambda: (
        bytes([90, *(byte for at in range(0, 90, 30) for byte in (0x7F, at, 30))]),
        bytes([90, *(byte for at in range(80, -1, -10) for byte in (0x7F, at, 25)), 0xFF, 0, 0, 0x60, 5, 9]),
        bytes([0, 0x7F, 0, 0]),
    ),
    max_bytes=256,
    bytes_per_byte=512,
    share=3,
)
OPEN_UPLOADS = Target(
    "open_uploads",
    take_frames,
    lambda: (
        bytes(byte for n in range(3) for at in range(0, 150, 30) for byte in (0x7F, n, 150, at, 30)),
        bytes(byte for n in range(8) for size in (80, 90, 100) for byte in (0x7F, n, size, 0, 70))
        + bytes([0xF8, 0, 0, 0, 0, 0xFF, 0, 0, 0, 0, 0x7F, 1, 100, 70, 30, 0xF0, 0, 0, 0, 0]),
    ),
    max_bytes=512,
    bytes_per_byte=512,
    share=2,
)
