"""The unfinished uploads of all devices: bounded in memory and on the disk. No clock."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aggregator.intake.upload import UPLOAD_BYTES, Size, Upload
from aggregator.intake.validation import Refused
from protocol.errors import TransferError
from protocol.wire.messages import Frame, Receipt

MAX_RANGES = 64
"""Missing ranges in one receipt."""

_MIB = 1024**2

Key = tuple[str, bytes]
"""An upload: its device, and the digest of its payload."""


@dataclass(kw_only=True)
class OpenUploads:
    """The unfinished uploads. A restart begins them again: devices send what has no receipt.

    An upload is in memory until it takes more than `max_upload_memory_bytes` there, or all of them more than
    `max_memory_bytes` and it has been without a frame for longest: then its bytes move to its file. A device with
    `per_device` uploads replaces its own. If the files are larger than `max_file_bytes`, the device whose files are
    largest loses its oldest upload. So a device never displaces an upload of one that stores less.

    An upload that may move to a file is refused if the files of all could become larger than the disk has room for.
    """

    folder: Path
    """Of the files."""
    max_bytes: int
    """Greatest size of a payload."""
    holds: Callable[[str, bytes], bool]
    """Returns True for a device and the digest of a payload that was accepted earlier."""
    room: Callable[[], float]
    """Returns the bytes by which the files may grow."""
    per_device: int = 2
    max_upload_memory_bytes: int = 4 * _MIB
    max_memory_bytes: int = 64 * _MIB
    max_file_bytes: int = 512 * _MIB
    """Or twice `max_bytes`, if that is more."""

    def __post_init__(self) -> None:
        self.max_file_bytes = max(self.max_file_bytes, 2 * self.max_bytes)
        self._uploads: dict[Key, Upload] = {}
        """The one without frames for longest comes first."""
        self._in_memory: dict[Key, Upload] = {}
        """Those with bytes in memory, in the same order."""
        self._keys_of: dict[str, dict[Key, None]] = {}
        """Each device's uploads, in the same order."""
        self._sizes: dict[Key, Size] = {}
        """The bytes that count for each."""
        self._announced_bytes = 0
        """The sizes of all once they are whole, in memory or in files."""
        self._memory_bytes = 0
        self._file_bytes = Counter[str]()
        """By device."""
        self._all_file_bytes = 0
        self._written_bytes = 0

    def take(self, device: str, frame: Frame, *, now_s: float = 0.0) -> Receipt | bytes | None:
        """Add a frame whose signature was verified.

        Returns the payload once it is whole; a receipt with the missing ranges for a frame with the upload's last
        bytes; None otherwise.

        Raises:
            Refused: the payload is too large, its frames contradict each other, or its digest is wrong.
            StateError: a file cannot be written or read.
        """
        key = (device, frame.digest)
        is_last = frame.offset + len(frame.data) >= frame.size_bytes
        if key not in self._uploads:
            if self.holds(*key):
                return Receipt(digest=frame.digest, status="received") if is_last else None
            self._open(key, frame)
        upload = self._uploads[key]
        self._touch(key, upload, now_s)
        try:
            upload.add(frame)
            if upload.is_whole:
                payload = upload.payload()
                self._drop(key)
                return payload
        except TransferError as error:
            self._drop(key)
            raise Refused("digest", str(error)) from error
        self._count(key, upload.size)
        self._make_room(key, upload)
        if not is_last or key not in self._uploads:
            return None
        return Receipt(digest=frame.digest, status="missing", missing=upload.missing(MAX_RANGES))

    def expire(self, before_s: float) -> list[Key]:
        """Drop the uploads without a frame since `before_s`; returns them."""
        old = [key for key, upload in self._uploads.items() if upload.seen_s < before_s]
        for key in old:
            self._drop(key)
        return old

    def drop_device(self, device: str) -> None:
        for key in list(self._keys_of.get(device, ())):
            self._drop(key)

    def _open(self, key: Key, frame: Frame) -> None:
        if frame.size_bytes > self.max_bytes:
            raise Refused("oversized", f"expected at most {self.max_bytes} bytes, got {frame.size_bytes}")
        own = list(self._keys_of.get(key[0], ()))
        for other in own[: len(own) - self.per_device + 1]:
            self._drop(other)
        self._require_room(frame)
        self._announced_bytes += UPLOAD_BYTES + frame.size_bytes
        path = self.folder / f"{key[0]}-{frame.digest.hex()}"
        self._uploads[key] = Upload(frame.digest, frame.size_bytes, path=path)
        self._keys_of.setdefault(key[0], {})[key] = None

    def _require_room(self, frame: Frame) -> None:
        """Raise Refused if an upload may move to a file, and there is no room for all files once they are whole."""
        announced = self._announced_bytes + UPLOAD_BYTES + frame.size_bytes
        is_small = frame.size_bytes <= self.max_upload_memory_bytes and announced <= self.max_memory_bytes
        if is_small or len(frame.data) == frame.size_bytes:
            return
        needed, room = min(announced, self.max_file_bytes) - self._written_bytes, max(0.0, self.room())
        if needed > room:
            text = f"not enough disk space: {needed / 1e6:.1f} MB needed, {room / 1e6:.1f} MB available"
            raise Refused("no_space", text)

    def _touch(self, key: Key, upload: Upload, now_s: float) -> None:
        """Move an upload to the end of each order: it has the newest frame."""
        upload.seen_s = now_s
        for each in (self._uploads, self._in_memory):
            each.pop(key, None)
            each[key] = upload
        own = self._keys_of[key[0]]
        own[key] = own.pop(key)

    def _make_room(self, key: Key, upload: Upload) -> None:
        """Move bytes from memory to files, and drop uploads from files, until all is within its bounds."""
        if upload.size.memory > self.max_upload_memory_bytes:
            self._flush(key, upload)
        while self._memory_bytes > self.max_memory_bytes and self._in_memory:
            self._flush(*next(iter(self._in_memory.items())))
        while self._all_file_bytes > self.max_file_bytes:
            largest = max(self._file_bytes, key=self._file_bytes.__getitem__)
            self._drop(next(each for each in self._keys_of[largest] if self._sizes[each].file))

    def _flush(self, key: Key, upload: Upload) -> None:
        upload.flush()
        self._count(key, upload.size)
        self._in_memory.pop(key, None)

    def _drop(self, key: Key) -> None:
        upload = self._uploads.pop(key)
        self._announced_bytes -= UPLOAD_BYTES + upload.size_bytes
        self._in_memory.pop(key, None)
        own = self._keys_of[key[0]]
        del own[key]
        if not own:
            del self._keys_of[key[0]]
        upload.discard()
        self._count(key, Size())
        del self._sizes[key]

    def _count(self, key: Key, size: Size) -> None:
        """Count what an upload takes now, in place of what it took before."""
        before, self._sizes[key] = self._sizes.get(key, Size()), size
        self._memory_bytes += size.memory - before.memory
        self._written_bytes += size.written - before.written
        if added := size.file - before.file:
            self._all_file_bytes += added
            self._file_bytes[key[0]] += added
            if not self._file_bytes[key[0]]:
                del self._file_bytes[key[0]]
