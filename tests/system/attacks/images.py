"""Images that are recognized wherever they should not be, and a decompression bomb."""

import struct
import zlib
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.support.fleet import write_digits
from tests.system.attacks.fleet import HONEST

IN_NAMES = "xyzzyname"
"""In the name of every image of the honest devices."""
IN_BYTES = "xyzzybytes"
"""In the bytes of every one."""
BOMB = "bomb.png"
BOMB_EDGE = 50_000


def write_images(root: Path) -> dict[str, Path]:
    """Write each honest device's images, half of the classes each, and a bomb among those of the first."""
    folders = {}
    for number, name in enumerate(HONEST):
        folder = write_digits(root / f"images-{name}", classes=list(range(5 * number, 5 * number + 5)))
        for file in sorted(folder.rglob("*.png")):
            mark(file)
        folders[name] = folder
    (folders[HONEST[0]] / "0" / BOMB).write_bytes(bomb())
    return folders


def mark(file: Path) -> None:
    """Give an image a name and bytes that can be searched for."""
    note = PngInfo()
    note.add_text("Comment", IN_BYTES)
    with Image.open(file) as image:
        image.save(file.with_name(f"{IN_NAMES}-{file.name}"), pnginfo=note)
    file.unlink()


def bomb(edge: int = BOMB_EDGE) -> bytes:
    """Return a PNG file of some kilobytes that decodes to gigabytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", edge, edge, 8, 0, 0, 0, 0)
    packer = zlib.compressobj(9)
    lines = b"".join(packer.compress(bytes(edge + 1)) for _ in range(edge // 100))
    data = lines + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
