"""The topic tree `pf/1/{fleet}/...`: builders, parser, subscriptions, and which messages are retained."""

import re
import zlib
from dataclasses import dataclass
from typing import Literal

from protocol.errors import MalformedMessage
from protocol.wire.messages import PROTOCOL_VERSION

DeviceChannel = Literal["state", "info", "up", "ack", "get", "blk"]
FleetChannel = Literal["task", "round", "head", "state", "cast"]
SumChannel = Literal["sums/request", "sums/reply"]

RETAINED = frozenset({"task", "round", "head", "state", "info"})
"""Channels whose last message the broker retains. Everything is published at QoS 1."""

FROM_DEVICES: tuple[DeviceChannel, ...] = ("state", "info", "up", "get")
"""The channels that devices publish on; the aggregator publishes on the others."""

SHARDS = 64
"""Number of sub-topics of `up`: a device's name decides which one it uses.

The parser accepts all of them from any device: one of an older version, which had 8, publishes on one of the first 8.
"""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DEVICE_TOPIC = re.compile(
    rf"pf/{PROTOCOL_VERSION}/(?P<fleet>[A-Za-z0-9_-]{{1,64}})/d/(?P<device>[A-Za-z0-9_-]{{1,64}})"
    r"/(?P<channel>state|info|get|ack|blk|up/(?:[1-5]?[0-9]|6[0-3]))"
)


@dataclass(frozen=True)
class DeviceTopic:
    """The parts of a device's topic."""

    fleet: str
    device: str
    channel: str


def is_name(text: str) -> bool:
    """Return whether `text` can name a fleet or device: 1 to 64 letters, digits, `_` or `-`."""
    return _NAME.fullmatch(text) is not None


def fleet_topic(fleet: str, channel: FleetChannel | SumChannel) -> str:
    """Return the topic of a channel of the whole fleet; `state` is the aggregator's presence."""
    return f"pf/{PROTOCOL_VERSION}/{fleet}/{channel}"


def device_topic(fleet: str, device: str, channel: DeviceChannel) -> str:
    """Return the topic of a device's channel; `up` includes the shard of the device's name."""
    tail = f"up/{zlib.crc32(device.encode()) % SHARDS}" if channel == "up" else channel
    return f"pf/{PROTOCOL_VERSION}/{fleet}/d/{device}/{tail}"


def device_filters(fleet: str) -> tuple[str, ...]:
    """Return subscriptions to every topic that devices publish on, one for the uploads on all shards."""
    tails = [channel for channel in FROM_DEVICES if channel != "up"]
    return tuple(f"pf/{PROTOCOL_VERSION}/{fleet}/d/+/{tail}" for tail in (*tails, "up/+"))


def parse_device_topic(topic: str) -> DeviceTopic:
    """Parse a device's topic: `parse_device_topic(device_topic(f, d, c)) == DeviceTopic(f, d, c)`.

    `up` may have any shard, not only that of the device's name.

    Raises:
        MalformedMessage: the topic is not a device's.
    """
    match = _DEVICE_TOPIC.fullmatch(topic)
    if match is None:
        raise MalformedMessage(f"not a device topic: {topic[:100]!r}")
    return DeviceTopic(match["fleet"], match["device"], match["channel"].split("/")[0])
