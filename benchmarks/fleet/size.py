"""Cost of a fleet by its size: up to thousands of devices with real connections, a real broker and a real aggregator.

`fleet size` lets each device connect, upload a submission, download the head and upload its evaluation, for growing
fleets. `aggregator run` and mosquitto are the real programs; devices are simulated by a few processes (`load`), of
which each has the device program's state machine, wire format and MQTT client for every device, and a connection of its
own, but no images, no disk and no process of its own.

It fails if a submission was lost or is not counted exactly once, or a device does not have the head's bytes.

`--idle` measures connections instead: devices with presence and will that do nothing, and a restart of the broker.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from aggregator.storage.open_store import open_store
from benchmarks.fleet.load.programs import Programs, require, until
from benchmarks.options import repeated
from benchmarks.report import Plot, Table, json_option, write_json

COLUMNS = {
    "devices": ">9,", "upload s": ">10.1f", "head s": ">8.1f", "ms a device": ">13.1f", "CPU ms a device": ">17.2f",
    "broker CPU ms": ">15.2f", "training s": ">12.1f", "MB at rest": ">12.0f", "peak MB": ">9.0f",
    "kB a device": ">13.1f",
}  # fmt: skip
IDLE_COLUMNS = {
    "phase": "<36", "seconds": ">9.1f", "connected": ">11,", "attempts": ">10,", "aggregator CPU s": ">18.2f",
    "broker CPU s": ">14.2f", "aggregator MB": ">15.0f", "its peak MB": ">13.0f", "broker MB": ">11.0f",
}  # fmt: skip


@click.command("size")
@repeated("--devices", type=click.IntRange(min=1), default=(100, 300, 1_000, 3_000), help="Of one fleet.")
@click.option(
    "--processes", type=click.IntRange(min=1), default=2, show_default=True, help="That simulate devices."
)
@click.option("--idle", type=click.IntRange(min=1), help="Connections that do nothing, instead of fleets.")
@click.option(
    "--minutes", type=click.FloatRange(min=0.01), default=3.0, show_default=True, help="Of `--idle`."
)
@json_option
def command(
    *, devices: tuple[int, ...], processes: int, idle: int | None, minutes: float, json_file: Path | None
) -> None:
    """Measure the aggregator's cost per device for fleets of growing size, or of connections that do nothing."""
    if idle is not None:
        with tempfile.TemporaryDirectory() as folder:
            table, runs = measure_idle(Path(folder), idle, processes=processes, rest_s=minutes * 60)
        write_json(json_file, "fleet-idle", tables=[table], runs=runs)
        return
    table, runs = Table(COLUMNS), []
    for number in sorted(devices):
        with tempfile.TemporaryDirectory() as folder:
            run = measure(Path(folder), number, processes=processes)
        runs.append(run)
        table.row(
            *(number, run["upload_s"], run["head_s"], *_milliseconds(run), run["training_s"]),
            *(run["before_bytes"] / 1e6, run["aggregator_peak_bytes"] / 1e6),
            (run["aggregator_peak_bytes"] - run["before_bytes"]) / 1e3 / number,
        )
    names = ("time", "processor time of the aggregator", "processor time of the broker")
    plot = Plot(
        title="Cost of a device, by the size of the fleet",
        x="devices",
        y="milliseconds a device",
        series={
            name: [(run["devices"], _milliseconds(run)[number]) for run in runs]
            for number, name in enumerate(names)
        },
        log=("x",),
    )
    write_json(json_file, "fleet", tables=[table], plots=[plot], runs=runs)


def _milliseconds(run: dict[str, Any]) -> tuple[float, float, float]:
    """Return the time of a device's upload and download, and the processor time of aggregator and broker."""
    each = 1e3 / run["devices"]
    return (
        each * (run["upload_s"] + run["head_s"]),
        each * run["aggregator_cpu_s"],
        each * run["broker_cpu_s"],
    )


def measure(folder: Path, devices: int, *, processes: int = 2) -> dict[str, Any]:
    """Run a fleet of so many devices until all have evaluated the head; return its costs in seconds and bytes.

    `upload_s` is from the first connection until the last receipt of a submission, `training_s` from then until the
    first device has the head, `head_s` from then until the last receipt of an evaluation.

    Raises:
        ProtofleetError: something was lost or counted twice.
    """
    with contextlib.ExitStack() as stack:
        programs = Programs(folder, stack, devices, processes=processes, quorum=devices)
        with programs.measured() as at_rest:
            pass
        with programs.measured() as costs:
            started_s = programs.loads.begin()
            final = programs.loads.finished()
            until(lambda: programs.evaluated() == devices, what="the evaluations of all devices")
    _check(programs.state, {name: tuple(each) for one in final for name, each in one["devices"].items()})
    received_s = max(one["received_s"] for one in final)
    head_s = min(one["head_s"] for one in final)
    return {
        "devices": devices,
        "upload_s": received_s - started_s,
        "training_s": head_s - received_s,
        "head_s": max(one["done_s"] for one in final) - head_s,
        "before_bytes": at_rest["aggregator_bytes"],
        **costs,
    }


def _check(state: Path, made: dict[str, tuple[str, str]]) -> None:
    """Compare what devices made with what the aggregator has; `made` are digests of submission and head, in hex."""
    with contextlib.closing(open_store(state, read_only=True)) as store:
        task = store.served_task().digest
        heads = store.heads.all(task)
        stored = {device: record.entry.digest.hex() for device, record in store.submissions.all(task).items()}
        evaluated = store.evaluations.devices(task, heads[-1].version)
    submitted = {device: submission for device, (submission, _) in made.items()}
    require(submitted == stored, "the aggregator has other submissions than devices made")
    require(len(heads) == 1, f"expected one head, got {len(heads)}")
    counted = msgspec.json.decode((state / "blobs" / heads[0].members.hex()).read_bytes())
    require(counted == stored, "the head was not made of each device's submission once")
    require({head for _, head in made.values()} == {heads[0].digest.hex()}, "a device has another head")
    require(evaluated == stored.keys(), "an evaluation was lost")


def measure_idle(
    folder: Path, devices: int, *, processes: int, rest_s: float
) -> tuple[Table, list[dict[str, Any]]]:
    """Hold connections for a while, restart the broker, and wait until all are back.

    Raises:
        ProtofleetError: a connection was lost, or did not come back.
    """
    table, runs = Table(IDLE_COLUMNS), list[dict[str, Any]]()
    with contextlib.ExitStack() as stack:
        programs = Programs(folder, stack, devices, processes=processes, quorum=1, is_idle=True)
        loads = programs.loads

        @contextlib.contextmanager
        def phase(name: str) -> Iterator[None]:
            with programs.measured() as costs:
                yield
            runs.append({"phase": name, **costs})
            table.row(
                *(name, costs["seconds"], costs["connected"], costs["attempts"]),
                *(costs["aggregator_cpu_s"], costs["broker_cpu_s"], costs["aggregator_bytes"] / 1e6),
                *(costs["aggregator_peak_bytes"] / 1e6, costs["broker_bytes"] / 1e6),
            )

        def are_back() -> bool:
            return loads.sum("connected") == devices == programs.online()

        with phase("none connected"):
            time.sleep(min(rest_s, 10.0))
        with phase("all connect"):
            loads.begin()
            until(are_back, what=f"{devices} connections and presences")
        with phase("at rest"):
            time.sleep(rest_s)
        require(are_back(), "a connection was lost at rest")
        require(runs[-1]["attempts"] == 0, "a connection was lost at rest, and came back")
        with phase("broker restarted, until all are back"):
            programs.restart_broker()
            until(are_back, what=f"{devices} connections and presences after the restart")
        with phase("at rest again"):
            time.sleep(min(rest_s, 60.0))
        require(are_back(), "a connection was lost after the restart")
    return table, runs
