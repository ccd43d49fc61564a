"""Images whose names and bytes can be searched for, and a decompression bomb."""

import zlib
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.support.devices.device_factory import gray_png
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
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(bytes(edge + 1)) for _ in range(edge // 100)) + packer.flush()
    return gray_png(edge, edge, data)
