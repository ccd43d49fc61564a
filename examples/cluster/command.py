"""The example's command line, and the order of its events."""

import shutil
import sys
import time
from pathlib import Path

import click
import msgspec
from rich.console import Console

from examples.cluster.experiment import BROKERS, TRAINER, UPLOAD_FAULTS, Plan, run
from examples.cluster.report import Result, show
from examples.quickstart import digits as data
from examples.quickstart.folder import Folder, device_names, prepare
from protocol.errors import ConfigError, StateError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("cluster"),
    show_default=True,
    help="Folder for images, states, logs and the head; an earlier run's is replaced.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result to this file as well.",
)
@click.option(
    "--devices",
    type=click.IntRange(data.FEWEST_DEVICES, 200),
    default=50,
    show_default=True,
    help="How many devices.",
)
@click.option(
    "--algorithm",
    type=click.Choice(("fedtc", "statistics")),
    default="fedtc",
    show_default=True,
    help="How the head is made.",
)
@click.option(
    "--broker",
    type=click.Choice(tuple(BROKERS)),
    default="nats",
    show_default=True,
    help="Three NATS servers, or two bridged mosquittos.",
)
@click.option(
    "--fault",
    "chosen",
    type=click.Choice((*UPLOAD_FAULTS, TRAINER)),
    multiple=True,
    help="Kill this only; repeatable.  [default: all]",
)
@click.option("--pause", is_flag=True, help="Pause the leading coordinator (SIGSTOP) instead of killing it.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Give up after so many seconds.",
)
def cli(
    *,
    out: Path,
    json_file: Path | None,
    devices: int,
    algorithm: str,
    broker: str,
    chosen: tuple[str, ...],
    pause: bool,
    timeout_s: float,
) -> None:
    """Kill programs of a cluster while 50 devices upload; its head must be that of a single process.

    Exit status 1 if the heads differ, or if a submission was lost or counted twice.
    """
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"no folder {json_file.parent} to write {json_file.name} in: make it first")
    folder, names = Folder(out.resolve()), device_names(devices)
    digits = data.load()
    deal = data.deal(digits.labels, devices=devices, seed=0)
    prepare(folder, digits, deal, names=names, seed=0, algorithm=algorithm)
    for path in (folder.root / "services", folder.root / "roles"):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    plan = Plan(names, broker, chosen or (*UPLOAD_FAULTS, TRAINER), pause, time.monotonic() + timeout_s)
    result = run(plan, folder, Console(stderr=True))
    if json_file is not None:
        _write(json_file, result)
    show(result, Console())
    sys.exit(0 if result.is_same else 1)


def _write(file: Path, result: Result) -> None:
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    except OSError as error:
        raise StateError(f"cannot write {file}: {error.strerror}") from error
