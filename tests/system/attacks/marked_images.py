"""Images whose names and bytes can be searched for, and a decompression bomb."""

import struct
import zlib
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.support.fleets.fleet import write_digits
from tests.system.attacks.fleet import HONEST

NAME_MARK = "xyzzyname"
"""In the name of every image of the honest devices."""
BYTES_MARK = "xyzzybytes"
"""In the bytes of every one."""
BOMB = "bomb.png"
BOMB_EDGE = 50_000


def write_images(root: Path) -> dict[str, Path]:
    """Write each honest device's images, half of the classes each, and a bomb among those of the first."""
    folders = {}
    for number, name in enumerate(HONEST):
        folder = write_digits(root / f"images-{name}", classes=list(range(5 * number, 5 * number + 5)))
        for file in sorted(folder.rglob("*.png")):
            _mark(file)
        folders[name] = folder
    (folders[HONEST[0]] / "0" / BOMB).write_bytes(_bomb(BOMB_EDGE))
    return folders


def _mark(file: Path) -> None:
    note = PngInfo()
    note.add_text("Comment", BYTES_MARK)
    with Image.open(file) as image:
        image.save(file.with_name(f"{NAME_MARK}-{file.name}"), pnginfo=note)
    file.unlink()


def _bomb(edge: int) -> bytes:
    """Return a PNG file of some kilobytes that decodes to gigabytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", edge, edge, 8, 0, 0, 0, 0)
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(bytes(edge + 1)) for _ in range(edge // 100)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
