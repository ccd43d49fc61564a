"""A device's enrollment with one of its files replaced: it is read whole, or refused in a line."""

import base64
import binascii
import contextlib
import functools
from collections.abc import Iterable
from pathlib import Path
from random import Random

from aggregator.security.enrollment import enroll
from aggregator.storage.store import Store
from protocol.enrollment import read_enrollment
from protocol.errors import ConfigError
from tests.fuzz.devices import folder
from tests.fuzz.target import Target

FILES = ("enrollment.toml", "ca.crt", "device.crt", "signing.key")


@functools.cache
def _enrolled() -> tuple[Path, dict[str, bytes]]:
    """A device's folder, and what is in it."""
    place = Path(folder().name) / "enrolled"
    store = Store(place / "state")
    made = place / "shed-1"
    enroll(store, "shed-1", fleet="orchard", out=made)
    store.close()
    return made, {name: (made / name).read_bytes() for name in FILES}


def read_damaged(data: bytes) -> None:
    """The first byte says which file the others are; nothing but `ConfigError` is raised."""
    if not data:
        return
    place, good = _enrolled()
    name = FILES[data[0] % len(FILES)]
    (place / name).write_bytes(data[1:])
    try:
        with contextlib.suppress(ConfigError):
            assert read_enrollment(place).device == "shed-1"
    finally:
        (place / name).write_bytes(good[name])


def mutate(data: bytes, random: Random) -> bytes:
    """Change a byte of what a PEM file encodes; of the other file, somewhere, a bracket."""
    lines = data.split(b"\n")
    try:
        inner = bytearray(base64.b64decode(b"".join(lines[1:-2]), validate=True))
    except binascii.Error:
        inner = bytearray()
    if len(lines) > 3 and inner:
        for _ in range(random.choice((1, 1, 3))):
            inner[random.randrange(len(inner))] = random.choice(
                (0, 1, 0x06, 0x30, 0x7F, 0x80, random.randrange(256))
            )
        return b"\n".join([lines[0], base64.encodebytes(bytes(inner)).strip(), *lines[-2:]])
    at = random.randrange(len(data) + 1)
    return data[:at] + random.choice((b"[", b"[" * 3000, b"{a=", b'"', b"1", b"\n")) + data[at:]


def _seeds() -> Iterable[bytes]:
    _, good = _enrolled()
    return (bytes([number]) + good[name] for number, name in enumerate(FILES))


ENROLLMENT = Target("enrollment", read_damaged, _seeds, mutate, bytes_per_byte=512, share=1)
