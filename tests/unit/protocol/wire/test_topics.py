"""The topic tree: built topics are parsed, other topics refused, and devices spread over shards."""

import re
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.client import topic_matches_sub

from protocol.errors import MalformedMessage
from protocol.wire.topics import (
    FROM_DEVICES,
    RETAINED,
    SHARDS,
    DeviceChannel,
    DeviceTopic,
    FleetChannel,
    SumChannel,
    device_filters,
    device_topic,
    fleet_topic,
    is_name,
    parse_device_topic,
)

NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
DEVICE_CHANNELS: tuple[DeviceChannel, ...] = get_args(DeviceChannel)
FLEET_CHANNELS: tuple[FleetChannel, ...] = get_args(FleetChannel)


@given(NAMES, NAMES, st.sampled_from(DEVICE_CHANNELS))
def test_built_topic_is_parsed(fleet: str, device: str, channel: DeviceChannel) -> None:
    assert parse_device_topic(device_topic(fleet, device, channel)) == DeviceTopic(fleet, device, channel)
    assert is_name(fleet)


@given(NAMES, NAMES, st.sampled_from(DEVICE_CHANNELS))
def test_subscriptions_match_device_topics_only(fleet: str, device: str, channel: DeviceChannel) -> None:
    topic = device_topic(fleet, device, channel)
    matches = [topic_matches_sub(pattern, topic) for pattern in device_filters(fleet)]
    assert sum(matches) == (channel in FROM_DEVICES)
    assert not any(topic_matches_sub(pattern, topic) for pattern in device_filters(fleet + "x"))


def test_a_receiver_subscribes_to_its_shards() -> None:
    """Each by its number, and all of them by one subscription."""
    own = device_filters("f", shards=[2, 0])
    assert [pattern for pattern in own if "/up/" in pattern] == ["pf/1/f/d/+/up/0", "pf/1/f/d/+/up/2"]
    assert device_filters("f", shards=range(SHARDS)) == device_filters("f")


@pytest.mark.parametrize("channel", FLEET_CHANNELS)
def test_fleet_topics_are_no_device_topics(channel: FleetChannel) -> None:
    topic = fleet_topic("f", channel)
    assert topic == f"pf/1/f/{channel}"
    assert not any(topic_matches_sub(pattern, topic) for pattern in device_filters("f"))
    with pytest.raises(MalformedMessage):
        parse_device_topic(topic)


def test_topics_of_version_1() -> None:
    spelled = {channel: device_topic("fleet", "dev-1", channel) for channel in DEVICE_CHANNELS}
    assert spelled == {
        "state": "pf/1/fleet/d/dev-1/state",
        "info": "pf/1/fleet/d/dev-1/info",
        "up": "pf/1/fleet/d/dev-1/up/22",
        "ack": "pf/1/fleet/d/dev-1/ack",
        "get": "pf/1/fleet/d/dev-1/get",
        "blk": "pf/1/fleet/d/dev-1/blk",
    }
    assert max(topic.count("/") for topic in spelled.values()) <= 7


def test_devices_spread_over_shards() -> None:
    used = Counter(device_topic("f", f"device-{n}", "up").rpartition("/")[2] for n in range(1000))
    assert used.keys() == {str(shard) for shard in range(SHARDS)}
    assert max(used.values()) < 2 * 1000 / SHARDS


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_device_may_publish_on_any_shard(shard: int) -> None:
    """One of an older version has another number of shards."""
    assert parse_device_topic(f"pf/1/f/d/dev/up/{shard}") == DeviceTopic("f", "dev", "up")


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "pf/1/f/d/dev",
        *(f"pf/1/f/d/dev/{tail}" for tail in ("", "state/", "state\n", "other", "up", "up/")),
        *(
            f"pf/1/f/d/dev/up/{shard}"
            for shard in ("64", "70", "100", "07", "-1", "+1", "1 ", "\u0663", "1/1")
        ),
        "pf/2/f/d/dev/state",
        "pf/1/f/d//state",
        "pf/1//d/dev/state",
        "pf/1/f/d/a b/state",
        "pf/1/f/d/" + "x" * 65 + "/state",
        "/pf/1/f/d/dev/state",
        "pf/1/f/d/dév/state",
        "pf/1/f/d/+/state",
    ],
)
def test_other_topics_are_refused(topic: str) -> None:
    with pytest.raises(MalformedMessage, match="not a device topic"):
        parse_device_topic(topic)


@pytest.mark.parametrize("text", ["", "a/b", "a b", "+", "#", "a\n", "é", "x" * 65, "$SYS"])
def test_invalid_names_are_refused(text: str) -> None:
    assert not is_name(text)


def test_every_topic_is_documented() -> None:
    """The table of `docs/protocol.md` names each, and the ones whose messages are retained."""
    page = (Path(__file__).parents[4] / "docs" / "protocol.md").read_text(encoding="utf-8")
    section = page.partition("\n## Topics\n")[2].partition("\n## ")[0].partition("\n### ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    topics: dict[str, str] = {fleet_topic("{fleet}", channel): channel for channel in FLEET_CHANNELS}
    topics |= {fleet_topic("{fleet}", channel): channel for channel in get_args(SumChannel)}
    for each in DEVICE_CHANNELS:
        topic = device_topic("{fleet}", "{device}", each)
        topics[re.sub(r"/up/\d+$", "/up/{shard}", topic)] = each
    assert {row[0].strip("`"): row[2] for row in rows} == {
        topic: "yes" if channel in RETAINED else "no" for topic, channel in topics.items()
    }
    assert len(rows) == len(topics)
    assert f"mod {SHARDS}" in section
