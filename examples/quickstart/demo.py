"""The demo: ten devices, a broker and an aggregator train one classifier on this machine.

Nothing is simulated: every device is the real device program with its own folder of images and a connection to a real
broker. This module writes the folders, starts the processes, and measures the result.
"""

import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.live import Live
from threadpoolctl import threadpool_limits

from aggregator.config.task_file import load_task
from aggregator.config.training_packages import missing_packages
from aggregator.status.collect import collect_status
from aggregator.storage.open_store import open_store
from examples.quickstart import digits as data
from examples.quickstart.fleet import Fleet, Usage
from examples.quickstart.folder import ALGORITHMS, Folder, device_names, prepare
from examples.quickstart.report import Accuracy, DeviceResult, Result, progress, show
from protocol.cli import counted
from protocol.errors import ConfigError, ProtofleetError, RuntimeMissing, StateError

if TYPE_CHECKING:
    from examples.quickstart.measure import Comparison


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("quickstart"),
    show_default=True,
    help="Folder for images, states, logs and the trained head; an earlier run's is replaced.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result to this file as well.",
)
@click.option(
    "--algorithm",
    type=click.Choice(ALGORITHMS),
    default="fedtc",
    show_default=True,
    help="How the head is made.",
)
@click.option(
    "--devices",
    type=click.IntRange(data.FEWEST_DEVICES, 50),
    default=10,
    show_default=True,
    help="How many devices; each has images of two digits.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Which device gets which image.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    help="Give up on the fleet after so many seconds.",
)
def cli(
    *, out: Path, json_file: Path | None, algorithm: str, devices: int, seed: int, timeout_s: float
) -> None:
    """Train one classifier of ten digits on devices that have images of two each."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"no folder {json_file.parent} to write {json_file.name} in: make it first")
    folder = Folder(out.resolve())
    console = Console(stderr=True)
    result = _demo(
        folder, algorithm=algorithm, devices=devices, seed=seed, timeout_s=timeout_s, console=console
    )
    if json_file is not None:
        _write(json_file, result)
    show(result, folder, Console())


def _demo(
    folder: Folder, *, algorithm: str, devices: int, seed: int, timeout_s: float, console: Console
) -> Result:
    """Run a fleet in a folder from its start to its evaluation.

    Raises:
        ProtofleetError: the folder cannot be used, or a process failed or took too long.
    """
    started_s = time.monotonic()
    if _status(folder).get("running"):
        raise ConfigError(f"a quickstart is running in {folder.root}: end it, or choose another --out")
    names = device_names(devices)
    digits = data.load()
    deal = data.deal(digits.labels, devices=devices, seed=seed)
    prepare(folder, digits, deal, names=names, seed=seed, algorithm=algorithm)
    if reason := missing_packages(load_task(folder.task)[0]):
        raise RuntimeMissing(f"{reason}: pip install -e '.[cpu,demo,train]'")
    _print(
        console,
        f"{len(digits.labels):,} handwritten digits: {len(digits.labels) - len(deal.held_out):,} on {devices} "
        f"devices, {len(deal.held_out)} held out",
    )
    summary, usage = _run_fleet(folder, names, timeout_s=timeout_s, console=console)
    head, rounds = summary["heads"][-1], (summary["round"] or {"rounds": 0})["rounds"]
    made = f"head trained on {summary['submissions']} submissions in {head['metrics']['seconds']:.1f} s"
    _print(console, f"{counted(rounds, 'round')} on the devices" if rounds else made)
    with console.status("comparing with other classifiers") as status:
        others = _compare(folder, names, status.update)
    return Result(
        algorithm=summary["algorithm"],
        rounds=rounds,
        fleet=_mean(others.fleet.values()),
        alone=_mean(others.alone.values()),
        nearest_mean_accuracy=others.nearest_mean,
        logistic_regression_accuracy=others.logistic_regression,
        devices=len(summary["devices"]),
        submissions=summary["submissions"],
        prototypes=head["prototypes"],
        bytes_up=sum(row["bytes"] for row in summary["devices"]),
        onnx_max_difference=head["metrics"].get("onnx_max_difference"),
        seconds=round(time.monotonic() - started_s, 2),
        held_out_images=len(deal.held_out),
        head=summary["head_path"],
        model=summary["model_path"],
        per_device=tuple(_device(folder, row, usage[row["device"]], others) for row in summary["devices"]),
    )


def _run_fleet(
    folder: Folder, names: tuple[str, ...], *, timeout_s: float, console: Console
) -> tuple[dict[str, Any], dict[str, Usage]]:
    """Run the processes until every device has evaluated the head.

    Returns the aggregator's status then, and what each device's process used.
    """
    with Fleet(folder, timeout_s=timeout_s) as fleet:
        with console.status("starting the aggregator and its broker"):
            fleet.start_aggregator()
        _print(console, f"aggregator and MQTT broker on {fleet.broker}")
        fleet.start_devices(names)
        with Live(console=console, transient=True) as live:
            fleet.wait_for_devices(lambda: live.update(progress(_status(folder), names)))
        summary = _status(folder)
        usage = {name: fleet.usage(name) for name in names}
    if not summary.get("heads") or summary["submissions"] < len(names):
        raise ProtofleetError(
            f"{summary.get('submissions', 0)} of {len(names)} submissions arrived; logs in {folder.logs}"
        )
    return summary, usage


def _status(folder: Folder) -> dict[str, Any]:
    """Return what `aggregator status --json` prints; empty before there is a state."""
    try:
        with contextlib.closing(open_store(folder.aggregator, read_only=True)) as store:
            summary: dict[str, Any] = msgspec.to_builtins(collect_status(store))
            return summary
    except StateError:
        return {}


def _compare(folder: Folder, names: tuple[str, ...], on_step: Callable[[str], None]) -> "Comparison":
    from examples.quickstart.measure import compare  # brings ONNX Runtime, which the fleet must not wait for

    with threadpool_limits(1):  # the matrices are small: more threads take longer on a busy machine
        return compare(folder, names, on_step)


def _mean(accuracies: Iterable[Accuracy]) -> Accuracy:
    pairs = list(accuracies)
    own, every = (statistics.mean(getattr(each, name) for each in pairs) for name in ("own", "all"))
    return Accuracy(own, every)


def _device(folder: Folder, row: dict[str, Any], usage: Usage, others: "Comparison") -> DeviceResult:
    return DeviceResult(
        device=row["device"],
        classes=tuple(sorted(path.name for path in folder.images(row["device"]).iterdir())),
        images=row["images"],
        prototypes=row["prototypes"],
        bytes_up=row["bytes"],
        cpu_s=round(usage.cpu_s, 2),
        peak_memory_bytes=usage.peak_memory_bytes,
        fleet=others.fleet[row["device"]],
        alone=others.alone[row["device"]],
    )


def _write(file: Path, result: Result) -> None:
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    except OSError as error:
        raise StateError(f"cannot write {file}: {error.strerror}") from error


def _print(console: Console, text: str) -> None:
    console.print(f"[green]\N{CHECK MARK}[/] {text}", highlight=False, soft_wrap=True)
