"""Images whose names and bytes are found wherever they are: on a device only."""

import zlib
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.support.devices.device_factory import gray_png

NAME_MARK = "xyzzyname"
"""Part of the name of each image."""

BYTES_MARK = "xyzzybytes"
"""Text in the file of each image."""

BOMB = "bomb.png"
BOMB_EDGE = 50_000


def mark_images(folder: Path) -> None:
    """Mark the names and bytes of all images in a folder."""
    for file in sorted(folder.rglob("*.png")):
        note = PngInfo()
        note.add_text("Comment", BYTES_MARK)
        with Image.open(file) as image:
            image.save(file.with_name(f"{NAME_MARK}-{file.name}"), pnginfo=note)
        file.unlink()


def write_bomb(folder: Path) -> None:
    """Write a PNG file of some kilobytes that decodes to gigabytes."""
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(BOMB_EDGE + 1)) for _ in range(BOMB_EDGE // 100)) + packer.flush()
    (folder / BOMB).write_bytes(gray_png(BOMB_EDGE, BOMB_EDGE, rows))
