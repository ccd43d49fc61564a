"""Annotations of a status: the metrics and the lines that are made from them."""

import contextlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from prometheus_client.parser import text_string_to_metric_families

from aggregator.http.metrics import metrics_text
from aggregator.http.snapshots import read_snapshot
from aggregator.status.annotations import Line, Metric, greatest, lines_of, metrics_of, number, total
from tests.unit.aggregator.status.stores import busy_store


class Shed(msgspec.Struct):
    name: str
    problem: Annotated[str, Meta(description="Why."), Metric("problems", value=number), Line("problem of")]
    drift: Annotated[float | None, Metric("drift", "Greatest.", greatest), Metric("known", "Known.", number)]
    refused: Annotated[dict[str, int], Metric("refused", "Refused.", total, label="reason")]


class Budget(msgspec.Struct):
    spent: Annotated[float, Meta(description="Spent."), Metric("spent")]

    def __str__(self) -> str:
        return f"{self.spent:.1f} spent"


class Barn(msgspec.Struct):
    sheds: Annotated[tuple[Shed, ...], Metric("sheds", "Sheds.", len)]
    budget: Annotated[Budget | None, Line("budget", style="bold")] = None
    closes_s: Annotated[float | None, Meta(description="When."), Metric("closes")] = None
    notes: Annotated[dict[str, int], Line("notes", ", ".join)] = {}


SHEDS = (Shed("a", "", 2.0, {"shape": 1}), Shed("b", "no room", None, {"shape": 2, "size": 1}))


def test_metrics_are_those_of_the_fields() -> None:
    """Of a struct in a tuple, of all values; of a missing value or struct, without a sample."""
    assert [(metric.name, text, samples) for metric, text, samples in metrics_of(Barn, [Barn(SHEDS)])] == [
        ("sheds", "Sheds.", 2),
        ("problems", "Why.", 1),
        ("drift", "Greatest.", 2.0),
        ("known", "Known.", 1),
        ("refused", "Refused.", {"shape": 3, "size": 1}),
        ("spent", "Spent.", None),
        ("closes", "When.", None),
    ]
    found = {metric.name: samples for metric, _, samples in metrics_of(Barn, [Barn((), Budget(2.5), 9.0)])}
    assert (found["sheds"], found["drift"], found["spent"], found["closes"]) == (0, None, 2.5, 9.0)


def test_lines_are_those_of_the_fields_that_are_not_empty() -> None:
    assert list(lines_of(Barn(SHEDS))) == []
    assert list(lines_of(Barn(SHEDS, Budget(2.5), notes={"x": 0}))) == [
        ("budget", "2.5 spent", "bold"),
        ("notes", "x", ""),
    ]
    assert [list(lines_of(each)) for each in SHEDS] == [[], [("problem of", "no room", "")]]


def test_fields_with_the_same_metric_add_up(tmp_path: Path) -> None:
    """Messages of a device that got another key since are counted on."""
    with contextlib.closing(busy_store(tmp_path)) as store:
        store.refusals.reset("c")
        store.refusals.count("d", reason="shape", detail="", now_s=2.0)
        text = metrics_text(read_snapshot(tmp_path)).decode()
    (family,) = [
        each for each in text_string_to_metric_families(text) if each.name == "protofleet_refused_messages"
    ]
    assert [(sample.labels["reason"], sample.value) for sample in family.samples] == [("shape", 2.0)]
