"""Memory for decoding images: what the process may use, and what an image needs by its header.

The limits are those of the machine, of its control groups (containers, `MemoryMax` of systemd) and of the process
(`ulimit -v`). Where the system has none of these files, memory is not limited.
"""

import contextlib
import os
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from PIL import ExifTags, Image

from edge_client.graphs.session import release_memory

SMALL_BYTES = 2**23
"""Images that need no more are decoded without a look at the memory."""

LARGE_BYTES = 2**27
"""Images that need more are decoded one at a time."""

MARGIN_BYTES = 2**25
"""Memory that decoding leaves free: for small images, and for the image after resizing."""

_CONTROL_GROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", ""),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
_UNLIMITED = 2**60
_ROW_BYTES = 20
_STORED_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 6, "I;16B": 6, "I": 12}
"""Of a pixel, by mode, in others 4; 16 bits are copied in parts before they are converted."""
_ROOT = Path("/")
_MIB = 2**20


def decoding_bytes(image: Image.Image, file_bytes: int) -> int:
    """Estimate the most memory that decoding an opened image and converting it to RGB takes at a time, bytes."""
    stored = _STORED_BYTES.get(image.mode, 4)
    is_turned = "exif" in image.info and image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    has_layer = image.has_transparency_data and image.mode != "RGBA"
    more = 8 if has_layer else 4 * (image.mode != "RGB")
    if image.info.get("progressive") or image.format == "TIFF":
        # All coefficients, or a strip of the whole image: the allocator may keep this memory during the conversion.
        more += 2 * len(image.getbands())
    if image.format == "WEBP":
        more = max(more, 16)  # two canvases, the pixels of a lossless image, and a copy
    whole_file = file_bytes if image.format in {"TIFF", "WEBP"} else 0
    return image.height * (image.width * (stored + stored * is_turned + more) + _ROW_BYTES) + whole_file


class _Reservations:
    """Memory that all threads together have reserved for decoding."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._bytes = 0

    @contextlib.contextmanager
    def reserve(self, size_bytes: int) -> Iterator[None]:
        """Reserve memory, after other images if they leave too little; raises MemoryError if there is too little."""
        if size_bytes <= SMALL_BYTES:
            yield
            return
        is_large = size_bytes > LARGE_BYTES
        with self._changed:
            # What is reserved may be in use already: it is subtracted twice then, but an image alone is not refused.
            while (is_large and self._bytes) or size_bytes + self._bytes > available_bytes():
                if self._bytes:
                    self._changed.wait()
                    continue
                release_memory()  # which the allocator has kept for threads
                if size_bytes <= available_bytes():
                    break
                needed, limit = -(-size_bytes // _MIB), limit_bytes() // _MIB
                raise MemoryError(
                    f"not enough memory to decode it: it needs {needed} MiB beside what is in use, and the limit is "
                    f"{limit} MiB: save it with fewer pixels"
                )
            self._bytes += size_bytes
        try:
            yield
        finally:
            with self._changed:
                self._bytes -= size_bytes
                self._changed.notify_all()
            if is_large:
                release_memory()


reserve = _Reservations().reserve


def available_bytes() -> int:
    """Return how much memory decoding may take now, bytes; negative if there is less than MARGIN_BYTES."""
    return min(left for _, left in _limits()) - MARGIN_BYTES


def limit_bytes() -> int:
    """Return how much memory the process may use at most, bytes."""
    return min(limit for limit, _ in _limits())


def _limits() -> Iterator[tuple[int, int]]:
    """Yield each limit of memory, and what is left of it, bytes."""
    yield sys.maxsize, sys.maxsize
    if "MemAvailable" in (machine := _numbers(_ROOT / "proc/meminfo")):
        yield machine["MemTotal"] * 1024, machine["MemAvailable"] * 1024
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError):
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            yield limit, limit - pages * os.sysconf("SC_PAGESIZE")
    with contextlib.suppress(OSError):
        for line in (_ROOT / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            for version in {"", "memory"}.intersection(controllers.split(",")):
                yield from _group_limits(PurePosixPath(group), *_CONTROL_GROUPS[version])


def _group_limits(
    group: PurePosixPath, mount: str, limit_file: str, used_file: str, prefix: str
) -> Iterator[tuple[int, int]]:
    for each in (group, *group.parents):  # in a container, its own is at the mount
        folder = _ROOT / mount / str(each).lstrip("/")
        with contextlib.suppress(OSError, ValueError):  # no such group here, or "max"
            limit = int((folder / limit_file).read_text(encoding="ascii"))
            if limit > _UNLIMITED:
                continue
            used = int((folder / used_file).read_text(encoding="ascii"))
            files = _numbers(folder / "memory.stat")  # which the system drops where memory is short
            cached = sum(files.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            yield limit, limit - used + cached


def _numbers(file: Path) -> dict[str, int]:
    """Return the first number of each line by its name; nothing where there is no such file."""
    with contextlib.suppress(OSError):
        lines = (line.split() for line in file.read_text(encoding="ascii").splitlines())
        return {name.rstrip(":"): int(value) for name, value, *_ in lines}
    return {}
