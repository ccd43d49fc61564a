"""Submissions a second: `aggregator run`, and one or several `aggregator receive` beside `aggregator coordinate`.

`python -m benchmarks cost receivers --store postgresql://...` sends the same packets of many devices through the same
mosquitto to each arrangement, in turns. The time is from the first packet until the last receipt. The schema of the
fleet `ingest` in the database is dropped before each run.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from benchmarks.cost.uploads.ingest import (
    FLEET,
    ROOT,
    TASK,
    Meter,
    count_receipts,
    listening,
    publisher,
    wait_online,
)
from benchmarks.cost.uploads.load import Load, write_load
from benchmarks.device.measurement import median, ratio
from benchmarks.processes import mosquitto, running, wait_for_log
from benchmarks.report import Table, json_option, write_json
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.topics import SHARDS, device_topic, fleet_topic

RUN, RUN_HERE = "aggregator run", "aggregator run, SQLite"


@dataclass(frozen=True)
class Cost:
    """Cost of a load: seconds, and seconds of a processor."""

    wall_s: float
    program_s: float
    """Of the program that takes the uploads; of all of them, if there are several."""
    submissions: int


@click.command("receivers")
@click.option(
    "--store",
    required=True,
    metavar="URL",
    envvar="PROTOFLEET_STORE",
    show_envvar=True,
    help="PostgreSQL database, whose schema fleet_ingest is dropped.",
)
@click.option("--devices", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--kilobytes", type=click.FloatRange(min=1), default=100.0, show_default=True)
@click.option(
    "--submissions", type=click.IntRange(min=1), default=8, show_default=True, help="Of each device."
)
@click.option("--receivers", type=click.IntRange(min=1), multiple=True, default=(1, 2), show_default=True)
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True)
@json_option
def command(
    *,
    store: str,
    devices: int,
    kilobytes: float,
    submissions: int,
    receivers: tuple[int, ...],
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Compare receivers with a single aggregator, on PostgreSQL."""
    arrangements = {RUN_HERE: 0, RUN: 0} | {_name(count): count for count in receivers}
    runs: dict[str, list[Cost]] = {name: [] for name in arrangements}
    with tempfile.TemporaryDirectory() as name, mosquitto(Path(name)) as broker:
        folder = Path(name)
        task = folder / "task.toml"
        backbone = ROOT / "examples" / "quickstart" / "backbone.onnx"
        task.write_text(TASK.format(fleet=FLEET, backbone=backbone))
        load = write_load(
            folder, task, devices=devices, submissions=submissions, size_bytes=int(kilobytes * 1000)
        )
        for number in range(repetitions + 1):
            for each, count in arrangements.items():
                database = "" if each == RUN_HERE else store
                cost = _measure(broker, load, task, folder / "state", database=database, receivers=count)
                if number:  # the first runs fill caches
                    runs[each].append(cost)
    table = Table(
        {
            "programs": "<22",
            "submissions/s": ">13.1f",
            "CPU ms/submission": ">17.2f",
            "speed, ratio": ">14.2f",
        },
        title=f"Submissions of {kilobytes:g} kB from {devices} devices",
    )
    for name, costs in runs.items():
        count = costs[0].submissions
        speed = ratio(runs[RUN], costs, "wall_s")
        table.row(name, count / median(costs, "wall_s"), 1000 * median(costs, "program_s") / count, speed)
    write_json(
        json_file,
        "receivers",
        tables=[table],
        runs={name: [asdict(run) for run in each] for name, each in runs.items()},
    )


def _measure(
    broker: BrokerAddress, load: Load, task: Path, state: Path, *, database: str, receivers: int
) -> Cost:
    """Measure until new programs have sent a receipt for every submission."""
    shutil.rmtree(state, ignore_errors=True)
    if database:
        _drop(database)
    topics = [fleet_topic(FLEET, "state"), *(device_topic(FLEET, name, "ack") for name in load.devices)]
    role = "coordinate" if receivers else "run"
    arguments = [role, "--task", str(task), "--state", str(state), "--broker", str(broker)]
    arguments += ["--store", database] if database else []
    with contextlib.ExitStack() as programs:
        events = programs.enter_context(listening(broker, *topics))
        aggregator = programs.enter_context(
            running("aggregator.cli", *arguments, log=state.with_name("aggregator.log"))
        )
        wait_online(events)
        pids = list(programs.enter_context(_receiving(broker, state, receivers))) or [aggregator.pid]
        programs.enter_context(publisher(broker, load))
        meters = [Meter(load, pid) for pid in pids]
        count_receipts(events, load.submissions)
        costs = [meter.read() for meter in meters]
    return Cost(costs[0].wall_s, sum(cost.receiver_s for cost in costs), load.submissions)


def _name(count: int) -> str:
    return f"{count} receiver{'s' if count > 1 else ''}"


@contextlib.contextmanager
def _receiving(broker: BrokerAddress, state: Path, count: int) -> Iterator[list[int]]:
    """Run receivers, each of as many shards; yields their process ids."""
    with contextlib.ExitStack() as programs:
        pids = []
        for number in range(count):
            log = state.with_name(f"receiver-{number}.log")
            shards = ",".join(map(str, range(number, SHARDS, count)))
            arguments = ["--name", f"receiver-{number}", "--shards", shards, "--state", str(state)]
            process = running("aggregator.cli", "receive", *arguments, "--broker", str(broker), log=log)
            pids.append(programs.enter_context(process).pid)
            wait_for_log(log, "connected to the broker")
        yield pids


def _drop(database: str) -> None:
    import psycopg

    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS fleet_{FLEET} CASCADE")
