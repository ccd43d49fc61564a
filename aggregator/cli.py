"""`aggregator run`, `status`, `rollback`, `promote`, `forget`, `enroll`, `enroll-broker`, `revoke` and `readmit`."""

import contextlib
import importlib.util
import json
import logging
import os
import pwd
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protocol.cli import (
    access_options,
    config_option,
    read_access,
    run,
    start_logging,
    stop_on_terminate,
    verbose_option,
)
from protocol.errors import ConfigError, RuntimeMissing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aggregator.coordination.rollout import CommandKind
    from aggregator.storage.store import Store

LONGEST_DAYS = 7300
"""As long as the authority counts."""

log = logging.getLogger(__name__)

state_option = click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("state"),
    show_default=True,
    envvar="PROTOFLEET_STATE",
    show_envvar=True,
    help="Folder of everything that survives a restart.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="protofleet")
def cli() -> None:
    """Collect prototypes from a fleet, train one head on them, and ship it back as ONNX."""


@cli.command("run")
@config_option
@click.option(
    "--task",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    envvar="PROTOFLEET_TASK",
    show_envvar=True,
    help="TOML file: fleet, classes, backbones, quorum, ...",
)
@state_option
@click.option(
    "--broker",
    default="127.0.0.1",
    show_default=True,
    metavar="HOST[:PORT]",
    envvar="PROTOFLEET_BROKER",
    show_envvar=True,
    help="The MQTT broker to connect to, or the address the embedded one listens on.",
)
@access_options
@click.option(
    "--embedded-broker",
    is_flag=True,
    envvar="PROTOFLEET_EMBEDDED_BROKER",
    show_envvar=True,
    help="Run a broker in this process; without --broker, for this machine only.",
)
@verbose_option
def run_command(
    *,
    task: Path,
    state: Path,
    broker: str,
    embedded_broker: bool,
    verbose: bool,
    **access_given: Any,
) -> None:
    """Serve a fleet until interrupted."""
    from aggregator.config.task_file import load_task
    from aggregator.messaging.embedded_broker import EmbeddedBroker
    from aggregator.security.identity import close_again, own_access
    from aggregator.service import Aggregator
    from aggregator.storage.store import Store, open_folder
    from aggregator.tasks.task import prepare_task
    from protocol.mqtt.session import parse_broker
    from protocol.mqtt.tls import NO_AUTHENTICATION, warnings

    start_logging(verbose=verbose)
    _require("onnx", "onnxscript", "onnxruntime", "scipy", "torch")
    access = read_access(**access_given)
    if embedded_broker and access != NO_AUTHENTICATION:
        raise click.UsageError(
            "the embedded broker has neither encryption nor passwords: run mosquitto for them"
        )
    address = parse_broker(broker, tls=access.tls)
    for warning in warnings(access, address):
        log.warning("%s", warning)
    task_file, backbones = load_task(task)
    store = Store(open_folder(state))
    access = own_access(state, access, fleet=task_file.fleet, is_closed=store.keys.is_closed())
    store.lock()
    if close_again(store):
        log.warning(
            "the fleet stays closed, but the database does not know all that were enrolled: "
            "`aggregator enroll --renew` those that are refused"
        )
    stop_on_terminate()
    prepared = prepare_task(task_file, backbones, store=store)
    embedded = EmbeddedBroker(address) if embedded_broker else None
    if embedded is not None:
        embedded.start()
    try:
        Aggregator(prepared, store, broker=address, access=access).run()
    finally:
        store.close()
        if embedded is not None:
            embedded.stop()


@cli.command("status")
@state_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
def status_command(*, state: Path, as_json: bool) -> None:
    """Show devices, submissions, coverage of the classes, and heads."""
    from aggregator.status import report, show
    from aggregator.storage.store import Store

    if not as_json:
        _require("rich")
    summary = report(Store(state, read_only=True))
    if as_json:
        click.echo(json.dumps(summary, indent=2))
        return
    from rich.console import Console

    # Where no terminal sets a width, lines are as long as they are.
    show(summary, Console(width=None if sys.stdout.isatty() else 200))


@cli.command("rollback")
@click.argument("version", type=click.IntRange(min=1), required=False)
@state_option
def rollback_command(*, version: int | None, state: Path) -> None:
    """Make head VERSION current again, or without it the one that was current before.

    All devices go back to it, and a candidate is given up. A head that is made later goes out as usual.
    """
    _order(state, "rollback", version)


@cli.command("promote")
@state_option
def promote_command(*, state: Path) -> None:
    """Give the candidate to all devices, without waiting for its canaries."""
    _order(state, "promote")


@cli.command("forget")
@click.argument("device")
@state_option
def forget_command(*, device: str, state: Path) -> None:
    """Take the next key that comes under the name DEVICE for its own, because it has lost the one it had."""
    with _existing(state) as store, store.transaction():
        if not store.keys.reset(device):
            raise ConfigError(
                f"{device} has no key that was taken at first use: `aggregator enroll` gives a device another one"
            )
        store.reset_device(device, delete_submissions=False)
    click.echo(f"the next key that comes under the name {device} is its own")


_fleet_option = click.option(
    "--task",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The task file, for the fleet's name; needed until the aggregator was started or somebody enrolled.",
)
_out_option = click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder to make; it must not be there yet."
)
_days_option = click.option(
    "--days",
    type=click.IntRange(1, LONGEST_DAYS),
    default=1825,
    show_default=True,
    help="For which the certificate counts.",
)


@cli.command("enroll")
@click.argument("device")
@_out_option
@click.option("--broker", default="", metavar="HOST[:PORT]", help="The broker, as the device reaches it.")
@_fleet_option
@state_option
@_days_option
@click.option("--renew", is_flag=True, help="Also if DEVICE is known; what it had counts no more then.")
def enroll_command(
    *, device: str, out: Path, broker: str, task: Path | None, state: Path, days: int, renew: bool
) -> None:
    """Let DEVICE into the fleet, and nobody any more who was not enrolled.

    All that it needs is in the folder then: give it to the device, and to nobody else.
    """
    from aggregator.security.enrollment import Wanted, enrol
    from protocol.mqtt.session import parse_broker

    if broker:
        parse_broker(broker)
    with _open_fleet(state, task) as (store, fleet):
        was_closed, had_certificate = store.keys.is_closed(), _had_certificate(store, device)
        enrol(store, Wanted(device, broker, days=days, renew=renew), fleet=fleet, out=out)
    where = "" if broker else " --broker HOST[:PORT]"
    click.echo(f"{device} is enrolled; start it with: edge-client --enrollment {out}{where} --data IMAGES")
    if not was_closed:
        click.echo("the fleet is closed from now on: devices that are not enrolled are refused")
    if had_certificate:
        _tell_list(state)


@cli.command("enroll-broker")
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@_out_option
@_fleet_option
@state_option
@_days_option
def enroll_broker_command(
    *, hosts: tuple[str, ...], out: Path, task: Path | None, state: Path, days: int
) -> None:
    """Make what mosquitto needs to let the fleet in and nobody else, reached as HOST, names or IP addresses."""
    from aggregator.security.enrollment import enrol_broker
    from aggregator.security.mosquitto_config import FOLDER

    with _open_fleet(state, task) as (store, fleet):
        enrol_broker(store, hosts, fleet=fleet, out=out, days=days)
    click.echo(
        f"put what is in {out} into {FOLDER}, and its mosquitto.conf into the place of mosquitto's own"
    )


@cli.command("revoke")
@click.argument("device")
@state_option
def revoke_command(*, device: str, state: Path) -> None:
    """Let DEVICE into the fleet no more, and train on nothing that it has uploaded."""
    from aggregator.security.enrollment import revoke

    with _existing(state) as store:
        listed = revoke(store, device)
    click.echo(f"{device} is revoked, and the aggregator refuses it from now on")
    if listed is not None:
        _tell_list(state)


def _tell_list(state: Path) -> None:
    """Say what the broker needs, so that it takes a certificate no more that was revoked."""
    from aggregator.security.identity import folder_of
    from aggregator.security.mosquitto_config import FOLDER

    listed = folder_of(state) / "revoked.crl"
    click.echo(
        f"for the broker to refuse the old certificate too, copy {listed} into {FOLDER} there, and restart it"
    )


def _had_certificate(store: "Store", device: str) -> bool:
    known = store.keys.get(device)
    return known is not None and bool(known.serial)


@contextlib.contextmanager
def _open_fleet(state: Path, task: Path | None) -> "Iterator[tuple[Store, str]]":
    """The aggregator's state, made if it is not there, and the fleet's name, from wherever it is known."""
    from aggregator.config.task_file import load_task
    from aggregator.security.identity import fleet_of_authority, folder_of, has_authority
    from aggregator.storage.facts import ServedTask
    from aggregator.storage.store import Store, open_folder

    named = load_task(task)[0].fleet if task is not None else None
    if named is None and not (state / "aggregator.sqlite").is_file():
        raise click.UsageError(
            f"no aggregator state in {state}: give the --state of `aggregator run`, or, "
            "before its first start, --task, the fleet's task file"
        )
    _require_owner(state)
    store = Store(open_folder(state))
    had_authority = has_authority(state)
    try:
        served = store.facts.get(ServedTask)
        known = served.fleet if served is not None else None
        if has_authority(state):
            known = fleet_of_authority(state)
        fleet = named or known
        if fleet is None:
            raise click.UsageError("give --task, the fleet's task file: nobody was enrolled here yet")
        yield store, fleet
        if not had_authority:
            click.echo(f"made an authority for the fleet {fleet} in {folder_of(state)}: keep a copy of it")
    finally:
        store.close()


@cli.command("readmit")
@click.argument("device")
@state_option
def readmit_command(*, device: str, state: Path) -> None:
    """Train on what DEVICE uploads, although it was quarantined.

    It stays in, whatever it uploads later, until it is revoked.
    """
    from aggregator.heads.quarantine import readmit

    with _existing(state) as store:
        click.echo(readmit(store, device))


@contextlib.contextmanager
def _existing(folder: Path) -> "Iterator[Store]":
    """Open the state that an aggregator has made, to write to it."""
    from aggregator.storage.store import Store

    Store(folder, read_only=True).close()  # a folder with no state must not become one
    _require_owner(folder)
    store = Store(folder)
    try:
        yield store
    finally:
        store.close()


def _require_owner(folder: Path) -> None:
    """See that root does not write files that the aggregator's own user cannot read.

    Raises:
        ConfigError: root does this in a folder of another user.
    """
    if os.geteuid() == 0 and folder.is_dir() and (owner := folder.stat().st_uid) != 0:
        try:
            name = pwd.getpwuid(owner).pw_name
        except KeyError:
            name = f"#{owner}"
        raise ConfigError(f"{folder} belongs to {name}, who could not read what root writes: sudo -u {name}")


def _order(folder: Path, kind: "CommandKind", version: int | None = None) -> None:
    from aggregator.heads.operator_commands import order

    with _existing(folder) as store:
        click.echo(order(store, kind, version))


def _require(*modules: str) -> None:
    """Look whether packages are installed, without importing them.

    Raises:
        RuntimeMissing: one is not.
    """
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise RuntimeMissing(f"{name} is not installed: pip install 'protofleet[aggregator,cpu]'")


def main() -> None:
    """Run the console script."""
    run(cli, program="aggregator")


if __name__ == "__main__":
    main()
