"""The `protofleet-sums` program."""

import protocol.first_process  # noqa: F401 - before all others

# isort: split

import dataclasses
import json
import logging
import re
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from protocol.cli import (
    Commands,
    access_options,
    config_option,
    counted,
    examples,
    read_access,
    run,
    say,
    setting,
    start_logging,
    verbose_option,
)
from protocol.errors import ConfigError
from protocol.log import event
from protocol.mqtt.tls import parse_brokers, warnings
from protocol.service_manager import ServiceManager, stop_on_terminate
from protocol.wire.messages import MAX_SUMMED
from protocol.wire.topics import is_name
from sums_operator.checks import DEFAULT_MIN_DEVICES, Policy
from sums_operator.service import Operator, Service
from sums_operator.state import PROGRAM, OperatorState, end_task, make_operator, make_task, read_keys

log = logging.getLogger(__name__)

_FOLDER = click.Path(file_okay=False, path_type=Path)
_LINE = re.compile(r"(?P<device>\S+)\s+(?P<key>[0-9A-Fa-f]{64})")

state_option = setting("--state", type=_FOLDER, required=True, help="State folder that `init` has created.")


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        f"{PROGRAM} init sums",
        f"{PROGRAM} new-task sums orchard.toml",
        f"{PROGRAM} run --state sums --broker broker.example --fleet orchard",
    ),
)
@click.version_option(package_name="protofleet")
def cli() -> None:
    """Open the sums of the devices' masks for an aggregator, and no single mask.

    For a party that the devices trust not to work with the aggregator's operator, on a machine of its own.
    """


@cli.command("init", epilog=examples(f"{PROGRAM} init sums"))
@click.argument("folder", type=_FOLDER)
def init_command(folder: Path) -> None:
    """Create a state folder with a new key, and operator.toml for the devices' owners."""
    card = make_operator(folder)
    say(f"{card} has the public key: give it to the devices' owners, for --second-operator")
    say(
        f"before each task: {PROGRAM} new-task {folder} TASK.toml, whose file the aggregator's operator needs"
    )
    say(
        f"Back up {folder} after each answered list: without its keys, lists that it has not opened are lost, "
        "and with an older operator.sqlite a device's submission could be in two sums."
    )


@cli.command("new-task", epilog=examples(f"{PROGRAM} new-task sums orchard.toml"))
@click.argument("folder", type=_FOLDER)
@click.argument("card", type=click.Path(dir_okay=False, path_type=Path))
def new_task_command(folder: Path, card: Path) -> None:
    """Make a seal key for one task, and the file CARD for `[privacy.sums] operator` of its task file.

    A program that runs on FOLDER uses it at once.
    """
    earlier = read_keys(folder).seal_keys()
    key = make_task(folder, card)
    say(f"{card} has the seal key of one task, signed: give it to the aggregator's operator")
    say(f"when that task is over: {PROGRAM} end-task {folder} {key[:16]}")
    for public in earlier:
        say(f"if an earlier task is over: {PROGRAM} end-task {folder} {public[:16]}")


@cli.command("end-task", epilog=examples(f"{PROGRAM} end-task sums 7f83b1657ff1fc53"))
@click.argument("folder", type=_FOLDER)
@click.argument("key", metavar="KEY")
def end_task_command(folder: Path, key: str) -> None:
    """Delete the seal key of a task that is over, by the beginning of its public key in hex.

    From then on, nobody can open masks of this task. Delete the key in backups as well.
    """
    say(f"deleted {end_task(folder, key)}: delete it in backups of {folder}, too")


@cli.command(
    "run",
    epilog=examples(
        f"{PROGRAM} run --state sums --broker broker.example --fleet orchard",
        f"{PROGRAM} run --state sums --broker broker.example --tls --fleet orchard --devices devices.txt",
    ),
)
@config_option
@state_option
@setting(
    "--broker",
    metavar="HOST[:PORT][,...]",
    required=True,
    help="MQTT broker of the fleet; several are tried in turn.",
)
@access_options
@setting("--fleet", required=True, help="Name of the fleet.")
@setting(
    "--min-devices",
    type=click.IntRange(2, MAX_SUMMED),
    default=DEFAULT_MIN_DEVICES,
    help="Devices in a sum, at least; a device can require more.",
)
@setting(
    "--devices",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with a line `DEVICE KEY` for each device, with `key` of its enrollment.toml: no other device is in a "
    "sum. Without it, the aggregator can invent devices, and so learn what a single one has submitted.",
)
@verbose_option
def run_command(
    *, state: Path, broker: str, fleet: str, min_devices: int, devices: Path | None, verbose: bool, **access_given: Any
) -> None:  # fmt: skip
    """Answer the aggregator's requests for sums, until interrupted."""
    start_logging(verbose=verbose)
    if not is_name(fleet):
        raise click.BadParameter(
            f"{fleet!r}: expected 1 to 64 letters, digits, '-' or '_'", param_hint="--fleet"
        )
    access = read_access(**access_given)
    brokers = parse_brokers(broker, tls=access.tls)
    for warning in warnings(access, brokers):
        log.warning("%s", warning)
    policy = Policy(fleet, min_devices, None if devices is None else read_devices(devices))
    if policy.devices is None:
        log.warning(
            "the aggregator can invent devices, and so learn a single device's values: give --devices"
        )
    stop_on_terminate()
    keys, manager = read_keys(state), ServiceManager()
    with closing(OperatorState(state)) as opened:
        event(log, logging.INFO, "second operator started", fleet=fleet, min_devices=min_devices)
        operator = Operator(keys, opened, policy, alive=manager.alive)
        Service(operator, brokers, access, fleet=fleet, manager=manager).run()


@cli.command("status", epilog=examples(f"{PROGRAM} status --state sums --json"))
@state_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status_command(*, state: Path, as_json: bool) -> None:
    """Show the public keys, the answered lists, and the refused requests by reason."""
    keys = read_keys(state)
    with closing(OperatorState(state, read_only=True)) as opened:
        answered, refused = opened.answered(), opened.refusals()
    if as_json:
        lists = [dataclasses.asdict(each) for each in answered]
        public = {**keys.public(), "seal_keys": keys.seal_keys()}
        say(json.dumps({**public, "answered": lists, "refused": msgspec.to_builtins(refused)}))
        return
    for name, key in (*keys.public().items(), *(("seal_key", key) for key in keys.seal_keys())):
        say(f"{name} {key}")
    for each in answered:
        say(f"answered {_date(each.answered_s)} task {each.task} {counted(each.devices, 'device')}")
    for reason, refusal in refused.items():
        times = counted(refusal.requests, "request")
        say(f"refused {times} ({reason}), the last {_date(refusal.last_s)}: {refusal.problem}")


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")


def read_devices(file: Path) -> dict[str, bytes]:
    """Return the public key (32 bytes) of each device in a file with a line `DEVICE KEY` for each.

    Raises:
        ConfigError: the file cannot be read, or a line is another, or repeats a device or a key.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the devices in {file}: {error}") from error
    devices: dict[str, bytes] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None or not is_name(found["device"]):
            raise ConfigError(
                f"expected DEVICE KEY in line {number} of {file}, with 64 hex digits, got {line!r}"
            )
        device, key = found["device"], bytes.fromhex(found["key"])
        if device in devices or key in devices.values():
            raise ConfigError(
                f"expected each device and each key once in {file}, got {device} again in line {number}"
            )
        devices[device] = key
    return devices


def main() -> None:
    """Run the console script."""
    run(cli, program=PROGRAM)
