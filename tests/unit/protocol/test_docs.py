"""`docs/protocol.md` lists every topic of the code, and `docs/wire-fields.md` every key on the wire."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from protocol.wire.messages import Frame, Message
from protocol.wire.topics import RETAINED, SHARDS, DeviceChannel, FleetChannel, device_topic, fleet_topic
from tests.support.messages.every_type import SAMPLES

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "protocol.md").read_text(encoding="utf-8")
FIELDS = (DOCS / "wire-fields.md").read_text(encoding="utf-8")


def _section(page: str, title: str) -> str:
    _, _, rest = page.partition(f"\n{title}\n")
    assert rest, f"no section {title!r}"
    return rest.partition("\n## ")[0].partition("\n### ")[0]


def _rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_every_key_of_a_message_is_documented(sample: Message | Frame) -> None:
    """A frame is an array: its type, and the fields in the order of the table."""
    section = _section(FIELDS, f"### {type(sample).__name__}")
    names = [row[0].strip("`") for row in _rows(section)]
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(sample))
    if isinstance(sample, Frame):
        assert sent == ["frame", *(getattr(sample, name) for name in names)]
    else:
        assert set(sent) <= {"type", "v", *names}
        assert f"`type`: `{sent['type']}`" in section


def test_every_topic_is_documented() -> None:
    fleet: tuple[FleetChannel, ...] = get_args(FleetChannel)
    device: tuple[DeviceChannel, ...] = get_args(DeviceChannel)
    topics: dict[str, str] = {fleet_topic("{fleet}", channel): channel for channel in fleet}
    for each in device:
        topic = device_topic("{fleet}", "{device}", each)
        topics[re.sub(r"/up/\d+$", "/up/{shard}", topic)] = each
    rows = _rows(_section(PAGE, "## Topics"))
    assert {row[0].strip("`"): row[2] for row in rows} == {
        topic: "yes" if channel in RETAINED else "no" for topic, channel in topics.items()
    }
    assert len(rows) == len(topics)
    assert f"mod {SHARDS}" in _section(PAGE, "## Topics")
