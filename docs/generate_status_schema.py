"""Write the JSON Schema of `aggregator status --json`: `python -m docs.generate_status_schema`."""

import json
from pathlib import Path

import msgspec

from aggregator.status.model import Status

PAGE = Path(__file__).with_name("status.schema.json")


def render() -> str:
    """Return the schema (JSON Schema 2020-12)."""
    schema = msgspec.json.schema(Status)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
