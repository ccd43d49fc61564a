"""Cost of PostgreSQL in place of SQLite: what reads and writes of a large fleet take.

`python -m benchmarks cost databases --store URL` measures both in turns, in folders and a schema of its own, which it
deletes. How far away the database is decides most: on another machine, each statement takes a round trip more.
"""

import contextlib
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from aggregator.config.task_file import load_task
from aggregator.coordination.round_state import Entry
from aggregator.heads.schedule import Schedule
from aggregator.http.snapshots import Stamps, read_snapshot
from aggregator.job_processes import JobRunner
from aggregator.status.collect import collect_status
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import ServedTask
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks.task_preparation import Task, prepare_task
from benchmarks.cost.uploads.ingest import write_task
from benchmarks.report import Table, json_option, write_json
from protocol.wire.codec import digest_of
from protocol.wire.messages import DeviceInfo

MIN_CALLS, MAX_CALLS = 3, 30
ENOUGH_S = 1.0
"""Seconds of one measurement after which a call is not repeated any more."""

Runs = dict[str, dict[str, list[float]]]
"""Seconds of each call, by what was measured and the database."""


@click.command("databases")
@click.option(
    "--store",
    "database",
    required=True,
    metavar="URL",
    envvar="PROTOFLEET_STORE",
    show_envvar=True,
    help="PostgreSQL database in which it may create schemas.",
)
@click.option(
    "--devices", type=click.IntRange(min=1), multiple=True, default=(1000, 10000), show_default=True
)
@json_option
def command(*, database: str, devices: Sequence[int], json_file: Path | None) -> None:
    """Compare PostgreSQL with SQLite."""
    table = Table(
        {
            "milliseconds": "<52",
            "devices": ">8,",
            "SQLite": ">10.2f",
            "PostgreSQL": ">12.2f",
            "ratio": ">8.1f",
        }
    )
    every: dict[str, Runs] = {}
    for number in devices:
        with tempfile.TemporaryDirectory() as folder:
            every[str(number)] = runs = read_and_written(Path(folder), database, devices=number)
        for name, found in runs.items():
            first, second = (statistics.median(found[each]) * 1000 for each in ("SQLite", "PostgreSQL"))
            table.row(name, number, first, second, second / first)
    write_json(json_file, "databases", tables=[table], runs=every)


def read_and_written(folder: Path, database: str, *, devices: int) -> Runs:
    """Return the seconds of reads and writes of a fleet in which each device has submitted, of calls in turn."""
    fleet = f"benchmark-{secrets.token_hex(4)}"
    task_file = load_task(write_task(folder, fleet))
    runs: Runs = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(deleted(database, fleet))
        calls = {}
        for name, url in (("SQLite", ""), ("PostgreSQL", database)):
            state = folder / name
            store = stack.enter_context(
                contextlib.closing(open_store(state, database=url, fleet=fleet, lock=True))
            )
            task = prepare_task(*task_file, store=store)
            other = stack.enter_context(contextlib.closing(open_store(state)))
            calls[name] = calls_of(task, store, other, stack, devices=devices)
        for measured in calls["SQLite"]:
            runs[measured] = measure({name: each[measured] for name, each in calls.items()})
    return runs


def calls_of(
    task: Task, store: Store, other: Store, stack: contextlib.ExitStack, *, devices: int
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return what is measured: each with what has to happen before."""
    training = Schedule(task, store, JobRunner(lambda _: None))
    stack.callback(training.stop)
    _fill(other, task, devices)  # only now: the blobs are missing, which the start would notice
    training.tick()
    stamps = Stamps(store.folder)
    stack.callback(stamps.close)
    sequence = iter(range(2, 1_000_000))

    def put(by: Store) -> None:
        by.submissions.put(task.digest, _record("device-0", next(sequence)))

    def nothing() -> None:
        pass

    def status() -> object:
        with contextlib.closing(open_store(store.folder, read_only=True)) as opened:
            return collect_status(opened)

    return {
        "one submission, in a transaction of its own": (nothing, lambda: put(store)),
        "tick, nothing changed": (nothing, training.tick),
        "tick after another program's submission": (lambda: put(other), training.tick),
        "aggregator status, without the start of Python": (nothing, status),
        "the dashboard, nothing changed": (nothing, stamps.read),
        "the dashboard after a change": (lambda: put(other), lambda: read_snapshot(store.folder)),
    }


def measure(calls: dict[str, tuple[Callable[[], object], Callable[[], object]]]) -> dict[str, list[float]]:
    """Return the seconds of each database's calls, in turns; the first ones fill caches."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    spent_s = 0.0
    for number in range(MAX_CALLS + 1):
        for name, (prepare, call) in calls.items():
            prepare()
            start_s = time.perf_counter()
            call()
            took_s = time.perf_counter() - start_s
            spent_s += took_s
            if number:
                found[name].append(took_s)
        if number >= MIN_CALLS and spent_s > ENOUGH_S * len(calls):
            break
    return found


@contextlib.contextmanager
def deleted(database: str, fleet: str) -> Iterator[None]:
    """Delete a fleet's schema afterwards."""
    import psycopg
    from psycopg import sql

    try:
        yield
    finally:
        with psycopg.connect(database, autocommit=True) as connection:
            schema = sql.Identifier(f"fleet_{fleet}")
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(schema))


def _record(device: str, sequence: int) -> SubmissionRecord:
    digest = digest_of(f"{device} {sequence}".encode())
    return SubmissionRecord(device, Entry(sequence, digest, 0.0), 2000, 20, 2, {0: 1, 1: 1})


def _fill(store: Store, task: Task, devices: int) -> None:
    """Store what a fleet has stored in which each device has reported and submitted once."""
    file = task.file
    info = DeviceInfo(
        epoch=1, software="0.1.0", runtime="ONNX Runtime", backbones=(), images={"a": 20}, unusable_images=0
    )
    with store.transaction():
        store.facts.put(
            ServedTask(
                *(task.digest, 1, file.fleet, file.algorithm, tuple(file.classes)),
                settings=file.settings,
                rollout=file.rollout,
            )
        )
        for number in range(devices):
            name = f"device-{number}"
            store.keys.pin(name, digest_of(name.encode()), now_s=1.0)
            store.devices.put_presence(name, "online", now_s=1.0)
            store.devices.put_info(name, info, now_s=1.0)
            store.submissions.put(task.digest, _record(name, 1))
