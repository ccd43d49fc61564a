"""The files of vectors: their names, and their values as JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.vectors import figures, images, joining, messages, presences, signatures, transfers

FOLDER = Path(__file__).parents[2] / "protocol" / "vectors"

MAX_SAFE = 2**53 - 1
"""The largest integer that every reader of JSON has exactly."""

FILES = {
    "messages.json": messages.vectors,
    "topics.json": messages.topics,
    "frames.json": transfers.vectors,
    "signatures.json": signatures.vectors,
    "trust.json": signatures.trust,
    "presence.json": presences.vectors,
    "joining.json": joining.vectors,
    "preprocessing.json": images.vectors,
    "outlier_filter.json": figures.outlier_filter,
    "prototypes.json": figures.prototypes,
    "canary.json": figures.canary,
    "confidence.json": figures.confidence,
}


def plain(value: Any) -> Any:
    """Return a value for JSON: structs as maps, bytes as {"hex": ...}, large integers as {"integer": ...}."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value).items()
        config = value.__struct_config__
        tag = {"type": config.tag} if config.tag else {}
        return {**tag, **{name: plain(each) for name, each in fields if each is not msgspec.UNSET}}
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each) for each in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_SAFE:
        return {"integer": str(value)}
    return value


def revived(value: Any) -> Any:
    """Return a value from JSON with bytes and large integers again."""
    if isinstance(value, dict):
        if value.keys() == {"hex"}:
            return bytes.fromhex(value["hex"])
        if value.keys() == {"integer"}:
            return int(value["integer"])
        return {name: revived(each) for name, each in value.items()}
    return [revived(each) for each in value] if isinstance(value, list) else value


def rendered(name: str) -> str:
    """Return a file's text: a case of a list is a line."""
    parts = []
    for key, value in FILES[name]().items():
        if isinstance(value, list):
            cases = ",\n".join(f"  {_line(each)}" for each in value)
            parts.append(f" {json.dumps(key)}: [\n{cases}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {_line(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def render() -> dict[str, str]:
    """Return the text of each file."""
    return {name: rendered(name) for name in FILES}


def _line(value: Any) -> str:
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
