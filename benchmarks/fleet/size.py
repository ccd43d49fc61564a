"""Cost of a fleet by its size: up to thousands of devices with real connections, a real broker and a real aggregator.

`fleet size` lets each device connect, upload a submission, download the head and upload its evaluation, for growing
fleets. `aggregator run` and mosquitto are the real programs; devices are simulated by a few processes (`load`),
of which each has the device program's state machine, wire format and MQTT client for every device, and a connection of
its own, but no images, no disk and no process of its own. `--real` adds real `edge-client` processes.

It fails if a submission was lost or is not counted exactly once, or a device does not have the head's bytes.

`--idle` measures connections instead: devices with presence and will that do nothing, and a restart of the broker.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from aggregator.storage.heads import HeadRecord
from aggregator.storage.open_store import open_store
from benchmarks.device.measurement import peak_memory
from benchmarks.fleet.load.observation import evaluated, online, submitted, usage
from benchmarks.fleet.load.processes import (
    running_aggregator,
    running_device,
    running_loads,
    until,
)
from benchmarks.options import repeated
from benchmarks.processes import free_address, running_mosquitto
from benchmarks.report import Plot, Table, json_option, write_json
from protocol.errors import ProtofleetError

SIZES = (100, 300, 1_000, 3_000)


@dataclass(frozen=True)
class Cost:
    """The cost of a fleet for the aggregator and the broker, in seconds and bytes."""

    devices: int
    real: int
    upload_s: float
    """From the first connection until the last receipt of a submission."""
    training_s: float
    """From then until the first device has the head."""
    head_s: float
    """From then until the last receipt of an evaluation."""
    cpu_s: float
    """Of the aggregator, without the training's process."""
    training_cpu_s: float
    broker_cpu_s: float
    before_bytes: int
    """The aggregator's memory before the first connection."""
    peak_bytes: int
    """The greatest so far."""

    @property
    def wall_s(self) -> float:
        """Return the time of uploads and downloads together."""
        return self.upload_s + self.head_s


@click.command("fleet")
@repeated("--devices", type=click.IntRange(min=1), default=SIZES, help="Of one fleet.")
@click.option(
    "--real", type=click.IntRange(min=0), default=0, help="Real `edge-client` processes beside them."
)
@click.option(
    "--processes", type=click.IntRange(min=1), default=2, show_default=True, help="That simulate devices."
)
@click.option("--idle", type=click.IntRange(min=1), help="Connections that do nothing, instead of fleets.")
@click.option(
    "--minutes", type=click.FloatRange(min=0.01), default=3.0, show_default=True, help="Of `--idle`."
)
@json_option
def command(
    *,
    devices: tuple[int, ...],
    real: int,
    processes: int,
    idle: int | None,
    minutes: float,
    json_file: Path | None,
) -> None:
    """Measure the aggregator's cost per device for fleets of growing size, or of connections that do nothing."""
    if idle is not None:
        with tempfile.TemporaryDirectory() as folder:
            table, runs = measure_idle(Path(folder), idle, processes=processes, rest_s=minutes * 60)
        write_json(json_file, "fleet-idle", tables=[table], runs=runs)
        return
    table = Table(
        {"devices": ">9,", "upload s": ">10.1f", "head s": ">8.1f", "ms a device": ">13.1f",
         "CPU ms a device": ">17.2f", "broker CPU ms": ">15.2f", "training s": ">12.1f", "MB at rest": ">12.0f",
         "peak MB": ">9.0f", "kB a device": ">13.1f"}
    )  # fmt: skip
    costs = []
    for number in sorted(devices):
        with tempfile.TemporaryDirectory() as folder:
            cost = measure(Path(folder), number, real=real, processes=processes)
        costs.append(cost)
        each = 1e3 / cost.devices
        grown = (cost.peak_bytes - cost.before_bytes) / 1e3 / cost.devices
        table.row(
            *(cost.devices, cost.upload_s, cost.head_s, cost.wall_s * each, cost.cpu_s * each),
            *(
                cost.broker_cpu_s * each,
                cost.training_s,
                cost.before_bytes / 1e6,
                cost.peak_bytes / 1e6,
                grown,
            ),
        )
    plot = Plot(
        title="Cost of a device, by the size of the fleet",
        x="devices",
        y="milliseconds a device",
        series={
            "time": [(cost.devices, cost.wall_s / cost.devices * 1e3) for cost in costs],
            "processor time of the aggregator": [
                (cost.devices, cost.cpu_s / cost.devices * 1e3) for cost in costs
            ],
            "processor time of the broker": [
                (cost.devices, cost.broker_cpu_s / cost.devices * 1e3) for cost in costs
            ],
        },
        log=("x",),
    )
    write_json(json_file, "fleet", tables=[table], plots=[plot], runs=[asdict(cost) for cost in costs])


def measure(folder: Path, devices: int, *, real: int = 0, processes: int = 2) -> Cost:
    """Run a fleet of so many devices, some of them real, until all have evaluated the head.

    Raises:
        ProtofleetError: something was lost or counted twice.
    """
    simulated = devices - real
    if simulated < 1:
        raise ProtofleetError(f"expected fewer real devices than {devices}, got {real}")
    broker = free_address()
    state = folder / "state"
    names = [f"real-{number}" for number in range(real)]
    with contextlib.ExitStack() as stack:
        mosquitto = stack.enter_context(running_mosquitto(folder, broker))
        aggregator = stack.enter_context(running_aggregator(folder, broker, quorum=devices))
        for name in names:
            stack.enter_context(running_device(folder, broker, name))
        until(lambda: submitted(state) == real, what="the submissions of the real devices")
        loads = stack.enter_context(running_loads(folder, broker, simulated, processes=processes))
        before, broker_before = usage(aggregator.pid), usage(mosquitto.pid)
        started_s = loads.begin()
        final = loads.finished()
        until(lambda: evaluated(state) == devices, what="the evaluations of all devices")
        # The training's process counts once the aggregator has waited for it, which it has before the head.
        used, broker_used = usage(aggregator.pid), usage(mosquitto.pid)
        peak_bytes = peak_memory(aggregator.pid)
    made = {name: tuple(each) for one in final for name, each in one["devices"].items()}
    _check(state, made, names)
    received_s = max(one["received_s"] for one in final)
    head_s = min(one["head_s"] for one in final)
    return Cost(
        devices=devices,
        real=real,
        upload_s=received_s - started_s,
        training_s=head_s - received_s,
        head_s=max(one["done_s"] for one in final) - head_s,
        cpu_s=used.cpu_s - before.cpu_s,
        training_cpu_s=used.workers_cpu_s - before.workers_cpu_s,
        broker_cpu_s=broker_used.cpu_s - broker_before.cpu_s,
        before_bytes=before.memory_bytes,
        peak_bytes=peak_bytes,
    )


def _check(state: Path, made: dict[str, tuple[str, str]], real: Sequence[str]) -> None:
    """Compare what devices made with what the aggregator has; `made` are digests of submission and head, in hex."""
    store = open_store(state, read_only=True)
    try:
        task = store.served_task().digest
        heads = store.heads.all(task)
        stored = {device: entry.digest.hex() for device, entry in store.entries(task).items()}
        evaluated = store.evaluations.devices(task, heads[-1].version)
    finally:
        store.close()
    submitted = {device: submission for device, (submission, _) in made.items()}
    _require(not stored.keys() ^ {*made, *real}, "the aggregator has other devices' submissions")
    _require(submitted.items() <= stored.items(), "the aggregator has other submissions than devices made")
    _require(len(heads) == 1, f"expected one head, got {len(heads)}")
    _require(_counted(heads[0]) == stored, "the head was not made of each device's submission once")
    _require({head for _, head in made.values()} == {heads[0].digest.hex()}, "a device has another head")
    _require(evaluated == stored.keys(), "an evaluation was lost")


def _require(is_true: object, otherwise: str) -> None:
    if not is_true:
        raise ProtofleetError(otherwise)


def _counted(head: HeadRecord) -> dict[str, str]:
    """Return the submissions that a head was made of, or that outlier detection excluded."""
    return {**head.members, **head.quarantined}


def measure_idle(
    folder: Path, devices: int, *, processes: int, rest_s: float
) -> tuple[Table, list[dict[str, Any]]]:
    """Hold connections for a while, restart the broker, and wait until all are back.

    Raises:
        ProtofleetError: a connection was lost, or did not come back.
    """
    broker = free_address()
    table = Table(
        {"phase": "<36", "seconds": ">9.1f", "connected": ">11,", "attempts": ">10,", "aggregator CPU s": ">18.2f",
         "broker CPU s": ">14.2f", "aggregator MB": ">15.0f", "its peak MB": ">13.0f", "broker MB": ">11.0f"}
    )  # fmt: skip
    runs: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        restarted = stack.enter_context(contextlib.ExitStack())
        mosquitto = restarted.enter_context(running_mosquitto(folder, broker))
        aggregator = stack.enter_context(running_aggregator(folder, broker, quorum=1))
        loads = stack.enter_context(running_loads(folder, broker, devices, processes=processes, is_idle=True))

        @contextlib.contextmanager
        def phase(name: str) -> Iterator[None]:
            began_s, ours, attempts = time.monotonic(), usage(aggregator.pid), loads.sum("attempts")
            theirs, process = usage(mosquitto.pid), mosquitto.pid
            yield
            seconds = time.monotonic() - began_s
            used, broker_used = usage(aggregator.pid), usage(mosquitto.pid)
            was_restarted = mosquitto.pid != process
            broker_cpu_s = broker_used.cpu_s - (0.0 if was_restarted else theirs.cpu_s)
            cells: dict[str, Any] = {
                "phase": name,
                "seconds": seconds,
                "connected": loads.sum("connected"),
                "attempts": loads.sum("attempts") - attempts,
                "cpu_s": used.cpu_s - ours.cpu_s,
                "broker_cpu_s": broker_cpu_s,
                "memory_bytes": used.memory_bytes,
                "peak_bytes": peak_memory(aggregator.pid),
                "broker_memory_bytes": broker_used.memory_bytes,
            }
            runs.append(cells)
            *figures, ours_bytes, peak_bytes, broker_bytes = cells.values()
            table.row(*figures, ours_bytes / 1e6, peak_bytes / 1e6, broker_bytes / 1e6)

        state = folder / "state"
        with phase("none connected"):
            time.sleep(min(rest_s, 10.0))
        with phase("all connect"):
            loads.begin()
            until(lambda: loads.sum("connected") == devices, what=f"{devices} connections")
            until(lambda: online(state) == devices, what=f"{devices} presences")
        attempts = loads.sum("attempts")
        with phase("at rest"):
            time.sleep(rest_s)
        _require(loads.sum("connected") == devices == online(state), "a connection was lost at rest")
        _require(loads.sum("attempts") == attempts, "a connection was lost at rest, and came back")
        with phase("broker restarted, until all are back"):
            restarted.close()
            until(lambda: loads.sum("connected") == 0, what="the end of all connections")
            mosquitto = restarted.enter_context(running_mosquitto(folder, broker))
            until(lambda: loads.sum("connected") == devices, what=f"{devices} connections after the restart")
            until(lambda: online(state) == devices, what=f"{devices} presences after the restart")
        with phase("at rest again"):
            time.sleep(min(rest_s, 60.0))
        _require(
            loads.sum("connected") == devices == online(state), "a connection was lost after the restart"
        )
    return table, runs
