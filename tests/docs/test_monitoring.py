"""The files in deploy/monitoring: valid, and about metrics that the aggregator has."""

import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest
import yaml
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from aggregator.config.limits import Limits
from aggregator.http.metrics import metrics_text
from aggregator.http.snapshots import read_snapshot
from protocol.wire.messages import Reason
from tests.docs.command_lines import DEPLOY
from tests.unit.aggregator.status.stores import busy_store, started_store

FOLDER = DEPLOY / "monitoring"
RUNBOOK = "docs/operations/runbook.md"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)


@pytest.fixture
def metrics(tmp_path: Path) -> set[str]:
    """The names that Prometheus stores."""
    with contextlib.closing(busy_store(tmp_path)):
        families = text_string_to_metric_families(metrics_text(read_snapshot(tmp_path)).decode())
        return {
            name for family in families for name in (family.name, *(each.name for each in family.samples))
        }


def table_of(text: str) -> str:
    """Return the table of the metrics in a text of the exposition format, as on the page."""
    rows = [
        f"| `{family.name}{'_total' if family.type == 'counter' else ''}` | {family.documentation} |"
        for family in text_string_to_metric_families(text)
    ]
    return "\n".join(["| metric | meaning |", "|---|---|", *rows])


def test_page_lists_the_metrics(tmp_path: Path) -> None:
    """All of them, with their help texts."""
    with contextlib.closing(started_store(tmp_path)):
        table = table_of(metrics_text(read_snapshot(tmp_path)).decode())
    page = (DEPLOY.parent / "docs" / "operations" / "dashboard.md").read_text(encoding="utf-8")
    assert f"<!-- metrics -->\n{table}\n<!-- end of metrics -->" in page, (
        "run `python -m docs.generate_status_schema`"
    )


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
def test_metrics_of_rules_and_panels_exist(file: str, metrics: set[str]) -> None:
    used = set(re.findall(r"protofleet_\w+", (FOLDER / file).read_text(encoding="utf-8")))
    assert used
    assert used <= metrics


def test_each_alert_has_its_section_of_the_runbook() -> None:
    """It says what the alert means, has three commands, the first `aggregator doctor`, and says what to do."""
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    page = (DEPLOY.parent / RUNBOOK).read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}
    assert list(sections) == [rule["alert"] for rule in rules]
    for rule in rules:
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOK}#{rule['alert'].lower()}"
        section = sections[rule["alert"]]
        commands = section.partition("```console\n")[2].partition("```")[0].splitlines()
        assert (commands[0], len(commands)) == ("aggregator doctor", 3)
        assert all(f"**{part}" in section for part in ("Meaning.", "Do.", "Worry"))


def test_runbook_explains_every_reason_of_a_refusal() -> None:
    page = (DEPLOY.parent / RUNBOOK).read_text(encoding="utf-8")
    reasons = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))
    assert sorted(reasons) == sorted(get_args(Reason))


def test_panels_do_not_overlap() -> None:
    """Each has a place of its own on Grafana's 24 columns, and a query."""
    panels = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert cells.isdisjoint(taken)
        assert max(x for x, _ in cells) < 24
        assert all(target["expr"] for target in panel["targets"])
        taken |= cells


@needs_promtool
def test_table_has_a_line_for_each_of_several(tmp_path: Path) -> None:
    """In each column; one that has ended within a day is still there, with the age of its last scrape."""
    series = [
        {"series": series, "values": values}
        for fleet, values in (("barn", "1+0x60"), ("orchard", "1+0x60"), ("ended", "1+0x5 stale"))
        for series in _series_of(tmp_path / fleet, fleet)
    ]
    table = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))["panels"][0]
    queries = [target["expr"].replace("$fleet", ".*") for target in table["targets"]]
    counts = [
        {"expr": f"count({query})", "eval_time": "60m", "exp_samples": [{"labels": "{}", "value": number}]}
        for query, number in zip(queries, [3, *[2] * (len(queries) - 1)], strict=True)
    ]
    test = {
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": counts}],
    }
    (file := tmp_path / "table.test.yml").write_text(yaml.safe_dump(test), encoding="utf-8")
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _series_of(folder: Path, fleet: str) -> list[str]:
    """Return the series of a fleet with quotas, as Prometheus scrapes them, beside an alert that fires."""
    with contextlib.closing(busy_store(folder)) as store:
        limits = Limits(max_devices=9)
        store.facts.put(replace(store.served_task(), fleet=fleet, limits=limits))
        text = metrics_text(read_snapshot(folder)).decode()
    lines = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    return [*lines, f'ALERTS{{alertname="ProtofleetDrift", alertstate="firing", fleet="{fleet}"}}']


@needs_promtool
def test_queries_of_panels_are_valid(tmp_path: Path) -> None:
    panels = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"].replace("$fleet", ".*") for panel in panels for target in panel["targets"]]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (file := tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "q", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts.test.yml"),
    ],
)
def test_promtool_accepts_the_rules(command: tuple[str, ...]) -> None:
    """Each alert fires when it should, and not before, on made-up series."""
    done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_metrics(tmp_path: Path) -> None:
    """Names, units and help texts are as Prometheus asks."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    with contextlib.closing(busy_store(tmp_path)):
        text = metrics_text(read_snapshot(tmp_path))
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
