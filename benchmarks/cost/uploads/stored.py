"""Time of an aggregator with many stored submissions: its start, a plan of all, an upload, the longest transaction.

`python -m benchmarks cost stored` fills a state directory with one small submission of each device, and calls what the
aggregator calls. Its training starts and is stopped at once.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from aggregator.config.task_file import load_task
from aggregator.coordination.collection import Collection
from aggregator.coordination.round_state import Entry
from aggregator.heads.open_collection import open_collection
from aggregator.heads.rollout import Rollout
from aggregator.heads.schedule import Schedule
from aggregator.job_processes import JobRunner
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks.retention import deletion
from aggregator.tasks.task_preparation import Task, prepare_task
from benchmarks.processes import ROOT
from benchmarks.report import Table, json_option, write_json
from protocol.wire.codec import digest_of

CALLS = 9
TASK = """\
fleet = "stored"
classes = ["a", "b", "c"]
backbones = ["{backbone}"]
quorum = {quorum}
"""


@dataclass
class Timed:
    """Seconds of calls, and of the transactions in which nothing else can write."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    transactions: list[float] = field(default_factory=list)

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Call a function, and note the seconds that it takes."""
        started_s = time.perf_counter()
        result = function()
        self.seconds.setdefault(name, []).append(time.perf_counter() - started_s)
        return result

    def watch(self, store: Store) -> None:
        """Note the seconds of each transaction of a store."""
        transaction = store.transaction

        @contextlib.contextmanager
        def timed() -> Iterator[None]:
            is_outer = not store.database.in_transaction()
            with transaction():
                started_s = time.perf_counter()
                yield
            if is_outer:
                self.transactions.append(time.perf_counter() - started_s)

        store.transaction = timed  # type: ignore[method-assign]


@click.command("stored")
@click.option(
    "--submissions",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1_000, 10_000, 100_000),
    show_default=True,
)
@json_option
def command(*, submissions: Sequence[int], json_file: Path | None) -> None:
    """Measure an aggregator with many stored submissions."""
    table = Table({"milliseconds": "<46", "submissions": ">12,", "median": ">10.1f", "longest": ">10.1f"})
    every: dict[str, dict[str, list[float]]] = {}
    for number in submissions:
        with tempfile.TemporaryDirectory() as folder:
            every[str(number)] = runs = measured(Path(folder), number)
        for name, seconds in runs.items():
            table.row(name, number, 1000 * statistics.median(seconds), 1000 * max(seconds))
    write_json(json_file, "stored", tables=[table], runs=every)


def measured(folder: Path, number: int) -> dict[str, list[float]]:
    """Return the seconds of each call with so many stored submissions."""
    file = folder / "task.toml"
    file.write_text(TASK.format(quorum=number, backbone=ROOT / "examples" / "quickstart" / "backbone.onnx"))
    task_file = load_task(file)
    with contextlib.closing(open_store(folder / "state", fleet="stored", lock=True)) as store:
        task = prepare_task(*task_file, store=store)
        _fill(store, task, number)
    timed = Timed()

    def start() -> tuple[Store, Schedule, Rollout]:
        opened = open_store(folder / "state", fleet="stored", lock=True)
        timed.watch(opened)
        return opened, Schedule(task, opened, JobRunner(lambda _: None)), Rollout(task, opened)

    store, training, releases = timed.call("start, without the connection", start)
    with contextlib.closing(store):
        timed.call("plan and start a head of all", training.tick)
        plan = training.plan
        if plan is None:
            raise click.ClickException("no head is planned")
        training.stop()
        with store.transaction():  # as the training's end would
            store.heads.delete(plan.task, plan.version)

        def count() -> Collection:
            return open_collection(store, task.digest, task.file.settings)

        for sequence in range(2, 2 + CALLS):
            timed.call("store one submission", partial(_put, store, task, f"device-{sequence}", sequence))
            timed.call("count the open collection after it", count)
            timed.call("pass of the rollout", lambda: releases.tick(at_once=True))
        steps = deletion(task, store)
        while (
            timed.call("step of the deletion of what nothing needs", lambda: next(steps, steps)) is not steps
        ):
            pass
    return {**timed.seconds, "transactions": timed.transactions}


def _put(store: Store, task: Task, device: str, sequence: int) -> None:
    data = f"{device} {sequence}".encode()
    digest = store.blobs.put(data)
    with store.transaction():
        entry = Entry(sequence, digest, store.clock.now_s())
        store.submissions.put(task.digest, SubmissionRecord(device, entry, len(data), 20, 2, {0: 1, 1: 1}))


def _fill(store: Store, task: Task, number: int) -> None:
    with store.transaction():
        for device in range(number):
            name = f"device-{device}"
            data = f"{name} 1".encode()
            digest = digest_of(data)
            (store.folder / "blobs" / digest.hex()).write_bytes(data)  # without waiting for the disk
            record = SubmissionRecord(name, Entry(1, digest, 0.0), len(data), 20, 2, {0: 1, 1: 1})
            store.submissions.put(task.digest, record)
