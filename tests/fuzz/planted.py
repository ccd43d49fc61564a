"""Targets with a fault in each, to see that faults are found."""

import time

from tests.fuzz.mutations import of_message
from tests.fuzz.target import MIB, Target


def _crash(data: bytes) -> None:
    """A fault behind four steps, each of which only coverage shows to be one."""
    if data[:1] == b"\x93" and len(data) > 8 and data[1] == 0xC0 and data[2] == 0x7F and data[3] > 0xF0:
        raise IndexError(data)


def _hang(data: bytes) -> None:
    if data[:2] == b"\x93\xc0" and len(data) > 4:
        time.sleep(3600)


def _hoard(data: bytes) -> None:
    """Room for what is announced, and not for what is there; it is never touched."""
    if data[:1] == b"\x93":
        bytes(64 * MIB)


PLANTED: dict[str, Target] = {
    name: Target(name, one_input, lambda: [b"\x91\x00"], of_message(), max_bytes=64)
    for name, one_input in (("crash", _crash), ("hang", _hang), ("hoard", _hoard))
}
