"""All fuzz targets by name, and targets with planted faults."""

import time

from tests.fuzz.aggregators import AGGREGATOR
from tests.fuzz.devices import DEVICE
from tests.fuzz.files import ARRAYS, ENROLLMENT, METADATA
from tests.fuzz.graphs import GRAPHS
from tests.fuzz.http_requests import HTTP
from tests.fuzz.joining import JOINING
from tests.fuzz.messages import MESSAGES, SECOND_MOMENT, SIGNATURES, TOPICS
from tests.fuzz.mutations import of_message
from tests.fuzz.sums import SUM_REPLIES, SUM_REQUESTS
from tests.fuzz.target import MIB, Target
from tests.fuzz.transfers import OPEN_UPLOADS, UPLOAD
from tests.fuzz.uploaded import UPLOADED

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        *(MESSAGES, TOPICS, SIGNATURES, UPLOAD, OPEN_UPLOADS, DEVICE, AGGREGATOR, UPLOADED, GRAPHS),
        *(ARRAYS, METADATA, ENROLLMENT, SECOND_MOMENT, HTTP, SUM_REQUESTS, SUM_REPLIES, JOINING),
    )
}


def _crash(data: bytes) -> None:
    """Fail behind four conditions, which only coverage can find one by one."""
    if data[:1] == b"\x93" and len(data) > 8 and data[1] == 0xC0 and data[2] == 0x7F and data[3] > 0xF0:
        raise IndexError(data)


def _hang(data: bytes) -> None:
    if data[:2] == b"\x93\xc0" and len(data) > 4:
        time.sleep(3600)


def _allocate(data: bytes) -> None:
    """Allocate memory without writing to it."""
    if data[:1] == b"\x93":
        bytes(64 * MIB)


PLANTED: dict[str, Target] = {
    name: Target(name, one_input, lambda: [b"\x91\x00"], of_message(), max_bytes=64)
    for name, one_input in (("crash", _crash), ("hang", _hang), ("allocate", _allocate))
}
