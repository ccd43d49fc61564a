"""`docs/protocol.md` lists every topic, message, field, type, default, bound and reason of the code."""

import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from protocol.wire import messages
from protocol.wire.messages import PROTOCOL_VERSION, Frame, Message, Reason, Tensor
from protocol.wire.topics import RETAINED, SHARDS, DeviceChannel, FleetChannel, device_topic, fleet_topic
from tests.support.messages.every_type import SAMPLES, WIRE_TYPES
from tests.unit.protocol.wire.test_codec import GOLDEN

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")

ALIASES = {
    "name": messages.Name,
    "text": messages.Text,
    "class name": messages.ClassName,
    "public key": messages.PublicKey,
    "signature": messages.Signature,
    "digest": messages.Digest,
    "natural": messages.Natural,
    "positive": messages.Positive,
    "byte count": messages.ByteCount,
    "images": messages.Images,
    "per class": messages.PerClass,
    "per bin": messages.PerBin,
    "tensor name": messages.TensorName,
    "tensor map": messages.TensorMap,
    "reason": messages.Reason,
    "figure": messages.Figure,
    "int": int,
    "float": float,
    "bytes": bytes,
}


def _section(title: str) -> str:
    level = title.split(" ", maxsplit=1)[0]
    match = re.search(
        rf"^{re.escape(title)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", PAGE, re.DOTALL | re.MULTILINE
    )
    assert match, f"no section {title!r}"
    return match[1]


def _rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    heads = {index - 1 for index, row in enumerate(cells) if set("".join(row)) == {"-"}}
    return [row for index, row in enumerate(cells) if index not in heads and index - 1 not in heads]


def _bounds(meta: msgspec.Meta, unit: str) -> str:
    low, high = meta.ge if meta.min_length is None else meta.min_length, meta.le
    high = high if meta.max_length is None else meta.max_length
    if meta.gt is not None:
        return f", above {meta.gt}, " + (f"at most {high}" if meta.lt is None else f"below {meta.lt}")
    if meta.lt is not None:
        return f", {low} to below {meta.lt}"
    if low is None:
        return f", at most {high}{unit}" if high is not None else ""
    return f", {low} to {high}{unit}" if high is not None else f", at least {low}{unit}"


def _type(annotation: Any) -> str:
    for name, alias in ALIASES.items():
        if annotation == alias:
            return name
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        unit = " bytes" if arguments[0] is bytes else ""
        return _type(arguments[0]) + _bounds(arguments[1], unit)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        given = [each for each in arguments if each is not msgspec.UnsetType]
        return " or ".join("nil" if each is type(None) else _type(each) for each in given)
    inner = [_type(each) for each in arguments if each is not Ellipsis]
    if origin is tuple:
        return f"list of {inner[0]}" if Ellipsis in arguments else f"({', '.join(inner)})"
    return f"map of {inner[0]} to {inner[1]}" if origin is dict else str(annotation.__name__)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    if field.default is msgspec.UNSET:
        return "absent"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return "`nil`" if value is None else f"`{msgspec.json.encode(value).decode()}`"


def _expected(wire_type: type[msgspec.Struct]) -> list[list[str]]:
    hints = get_type_hints(wire_type, include_extras=True)
    rows = [
        [f"`{field.encode_name}`", _type(hints[field.name]), _default(field)]
        for field in msgspec.structs.fields(wire_type)
        if not (issubclass(wire_type, Message) and field.name == "v")
    ]
    if wire_type is Frame:
        rows.insert(0, ["`type`", "`frame`", "required"])
    return rows


def test_every_type_has_a_section() -> None:
    expected = [
        f"{wire_type.__name__}: `{tag}`" if (tag := wire_type.__struct_config__.tag) else wire_type.__name__
        for wire_type in WIRE_TYPES
    ]
    found = re.findall(r"^### (.*)$", _section("## Messages"), re.MULTILINE)
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("wire_type", WIRE_TYPES, ids=lambda wire_type: wire_type.__name__)
def test_every_field_is_documented(wire_type: type[msgspec.Struct]) -> None:
    tag = wire_type.__struct_config__.tag
    rows = _rows(_section(f"### {wire_type.__name__}: `{tag}`" if tag else f"### {wire_type.__name__}"))
    assert [row[:3] for row in rows] == _expected(wire_type)
    assert all(row[3] for row in rows)


def test_envelope_is_documented() -> None:
    assert [row[0] for row in _rows(_section("## Envelope"))] == ["`type`", "`v`"]
    for sample in SAMPLES:
        envelope = msgspec.msgpack.decode(msgspec.msgpack.encode(sample))
        tag, version = envelope[:2] if isinstance(sample, Frame) else (envelope["type"], envelope["v"])
        assert (tag, version) == (type(sample).__struct_config__.tag, PROTOCOL_VERSION)
    assert Tensor.__struct_config__.array_like


def test_every_topic_is_documented() -> None:
    fleet: tuple[FleetChannel, ...] = get_args(FleetChannel)
    device: tuple[DeviceChannel, ...] = get_args(DeviceChannel)
    topics: dict[str, str] = {fleet_topic("{fleet}", channel): channel for channel in fleet}
    for each in device:
        topic = device_topic("{fleet}", "{device}", each)
        topics[re.sub(r"/up/\d+$", "/up/{shard}", topic)] = each
    rows = _rows(_section("## Topics"))
    assert {row[0].strip("`"): row[2:4] for row in rows} == {
        topic: ["1", "yes" if channel in RETAINED else "no"] for topic, channel in topics.items()
    }
    assert len(rows) == len(topics)
    assert f"mod {SHARDS}" in _section("## Topics")


def test_every_reason_is_documented() -> None:
    rows = _rows(_section("## Reasons"))
    assert [row[0].strip("`") for row in rows] == list(get_args(Reason))
    assert all(row[1] for row in rows)


def test_limits_are_documented() -> None:
    expected = {name: f"{value:,}" for name, value in vars(messages).items() if name.startswith("MAX_")}
    assert {row[0].strip("`"): row[1] for row in _rows(_section("## Limits"))} == expected


def test_every_type_name_is_documented() -> None:
    rows = {row[0]: row[1] for row in _rows(_section("## Types"))}
    assert rows.keys() == ALIASES.keys()
    limits = {"text": 256, "class name": 128, "digest": 32, "per class": 4096, "per bin": 32}
    for word, number in (limits | dict.fromkeys(("name", "tensor name", "tensor map"), 64)).items():
        assert str(number) in rows[word].replace(",", "")
    assert f"{messages.MAX_BLOB_BYTES:,}" in rows["byte count"]


def test_example_bytes_are_the_golden_ones() -> None:
    (shown,) = re.findall(r"```hex\n(.*?)```", PAGE, re.DOTALL)
    assert "".join(re.sub(r"#.*", "", shown).split()) == GOLDEN["Presence"]
