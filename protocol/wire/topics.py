"""The topic tree `pf/1/{fleet}/...`: builders, the parser, and who may retain what."""

import re
import zlib
from dataclasses import dataclass
from typing import Literal

from protocol.errors import MalformedMessage
from protocol.wire.messages import PROTOCOL_VERSION

DeviceChannel = Literal["state", "info", "up", "ack", "get", "blk"]
FleetChannel = Literal["task", "round", "head", "state", "cast"]

RETAINED: dict[str, bool] = {
    "task": True,
    "round": True,
    "head": True,
    "state": True,
    "cast": False,
    "info": True,
    "up": False,
    "ack": False,
    "get": False,
    "blk": False,
}
"""Which channels keep their last message on the broker. Everything travels at QoS 1."""

FROM_DEVICES: tuple[DeviceChannel, ...] = ("state", "info", "up", "get")
"""What the aggregator listens to; the other channels are its own to write."""

SHARDS = 8
"""Uplinks are spread over this many sub-topics, so that several aggregator workers could share them."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DEVICE_TOPIC = re.compile(
    rf"pf/{PROTOCOL_VERSION}/(?P<fleet>[A-Za-z0-9_-]{{1,64}})/d/(?P<device>[A-Za-z0-9_-]{{1,64}})"
    r"/(?P<channel>state|info|get|ack|blk|up/[0-7])"
)


@dataclass(frozen=True)
class DeviceTopic:
    """A device's topic taken apart."""

    fleet: str
    device: str
    channel: str


def is_name(text: str) -> bool:
    """Whether `text` can name a fleet or a device: 1 to 64 of letters, digits, `_` and `-`."""
    return _NAME.fullmatch(text) is not None


def fleet_topic(fleet: str, channel: FleetChannel) -> str:
    """The topic of what concerns the whole fleet; `state` is the aggregator's own presence."""
    return f"pf/{PROTOCOL_VERSION}/{fleet}/{channel}"


def device_topic(fleet: str, device: str, channel: DeviceChannel) -> str:
    """The topic of one device's channel; uplinks carry the device's shard."""
    tail = f"up/{zlib.crc32(device.encode()) % SHARDS}" if channel == "up" else channel
    return f"pf/{PROTOCOL_VERSION}/{fleet}/d/{device}/{tail}"


def device_filters(fleet: str) -> tuple[str, ...]:
    """What the aggregator subscribes to: everything that devices write."""
    return tuple(
        f"pf/{PROTOCOL_VERSION}/{fleet}/d/+/{'up/+' if channel == 'up' else channel}"
        for channel in FROM_DEVICES
    )


def parse_device_topic(topic: str) -> DeviceTopic:
    """Take a device's topic apart: `parse_device_topic(device_topic(f, d, c)) == DeviceTopic(f, d, c)`.

    Raises:
        MalformedMessage: it is no device's topic of this protocol.
    """
    match = _DEVICE_TOPIC.fullmatch(topic)
    if match is None:
        raise MalformedMessage(f"not a device topic: {topic[:100]!r}")
    return DeviceTopic(match["fleet"], match["device"], match["channel"].split("/")[0])
