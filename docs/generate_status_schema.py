"""Write the JSON Schema of `aggregator status --json` and the metrics: `python -m docs.generate_status_schema`."""

import json
from pathlib import Path

import msgspec

from aggregator.http.metrics import described
from aggregator.status.model import Status

PAGE = Path(__file__).with_name("status.schema.json")

METRICS_PAGE = Path(__file__).parent / "operations" / "dashboard.md"
START, END = "<!-- metrics -->\n", "<!-- end of metrics -->"


def render() -> str:
    """Return the schema (JSON Schema 2020-12)."""
    schema = msgspec.json.schema(Status)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def render_metrics() -> str:
    """Return the page of the dashboard with the table of metrics."""
    before, _, rest = METRICS_PAGE.read_text(encoding="utf-8").partition(START)
    rows = [f"| `{name}` | {text} |\n" for name, text in described().items()]
    return "".join([before, START, "| metric | meaning |\n|---|---|\n", *rows, END, rest.partition(END)[2]])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    METRICS_PAGE.write_text(render_metrics(), encoding="utf-8")
