"""`aggregator enroll`, `enroll-broker`, `enroll-sums`, `reset-key`, `rotate-key` and `issue-key`."""

import contextlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aggregator.cli.state import state_option
from aggregator.commands.arguments import DeviceArguments
from protocol.cli import examples
from protocol.errors import ConfigError, StateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aggregator.commands.session import Session
    from aggregator.storage.store import Store

MAX_DAYS = 7300
"""The lifetime of the fleet's CA certificate."""

_fleet_option = click.option(
    "--task",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Task file, for the fleet's name; required before the first start and the first enrollment.",
)
_out_option = click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder to create; it must not exist."
)
_days_option = click.option(
    "--days",
    type=click.IntRange(1, MAX_DAYS),
    default=1825,
    show_default=True,
    help="Validity of the certificate.",
)


def _public_key(_context: click.Context, _option: click.Parameter, text: str | None) -> bytes:
    if text is None:
        return b""
    if not re.fullmatch("[0-9A-Fa-f]{64}", text):
        raise click.BadParameter(f"expected 64 hex digits, got {text!r}")
    return bytes.fromhex(text)


@click.command(
    "enroll",
    epilog=examples(
        "aggregator enroll shed-1 --out shed-1 --broker broker.example --task task.toml",
        "aggregator enroll --link --url https://fleet.example",
    ),
)
@click.argument("device", required=False)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder to create; it must not exist. Required without --link.",
)
@click.option(
    "--link",
    is_flag=True,
    help="Print a link that enrolls one device, in place of a folder; without DEVICE, the device chooses its name.",
)
@click.option("--url", metavar="URL", help="Address of the dashboard as seen from the device, for --link.")
@click.option(
    "--valid-minutes",
    type=click.IntRange(1, 7 * 24 * 60),
    default=15,
    show_default=True,
    help="Validity of the link.",
)
@click.option(
    "--broker",
    default="",
    metavar="HOST[:PORT][,...]",
    help="Broker address as seen from the device; several are tried in turn.",
)
@_fleet_option
@state_option
@_days_option
@click.option("--renew", is_flag=True, help="Replace the keys of a device that is enrolled or revoked.")
@click.option(
    "--key",
    metavar="HEX",
    callback=_public_key,
    help="Public key of the signing.key that the device's owner has made with `edge-client make-key` and keeps.  "
    "[default: made here]",
)
def enroll_command(  # noqa: PLR0913 - one for each option
    *,
    device: str | None,
    out: Path | None,
    link: bool,
    url: str | None,
    valid_minutes: int,
    broker: str,
    task: Path | None,
    state: Path,
    days: int,
    renew: bool,
    key: bytes,
) -> None:
    """Enroll DEVICE and close the fleet to devices that are not enrolled.

    Copy the folder to the device and keep it secret: it contains the device's private keys. With --link, the device
    makes its keys itself: open the link on a phone, or give it to `edge-client join` on a box.
    """
    from protocol.mqtt.tls import parse_brokers

    if broker:
        parse_brokers(broker)
    given = {"broker": broker, "days": days, "renew": renew}
    if link:
        if out is not None or key or not url:
            raise click.UsageError("--link needs --url, and neither --out nor --key")
        if not re.fullmatch(r"https?://[^#?\s]+", url):
            raise ConfigError(f"expected --url as https://HOST, got {url!r}")
        _print_link(state, task, address=url, device=device or "", valid_minutes=valid_minutes, **given)
        return
    if device is None or out is None or url is not None:
        raise click.UsageError("expected DEVICE and --out DIR, or --link and --url URL")
    _enroll(state, task, device, out, key=key, **given)


def _enroll(state: Path, task: Path | None, device: str, out: Path, *, key: bytes, **given: Any) -> None:
    from aggregator.security.enrollment import enroll, revocation_advice

    with _fleet_session(state, task) as (session, fleet):
        store = session.store
        was_closed, known = store.keys.is_closed(), store.keys.get(device)
        enroll(
            store,
            device,
            fleet=fleet,
            out=out,
            key=key,
            max_devices=_max_devices(store, task),
            write=session.change_keys,
            **given,
        )
    if key:
        click.echo(f"put the signing.key of this public key into {out}")
    where = "" if given["broker"] else " --broker HOST[:PORT]"
    click.echo(f"enrolled {device}; start it with: edge-client --enrollment {out}{where} --data IMAGES")
    if not was_closed:
        click.echo("the fleet is now closed: devices that are not enrolled are refused")
    if known is not None and known.serial:
        click.echo(revocation_advice(state))


def _print_link(state: Path, task: Path | None, *, valid_minutes: int, **given: Any) -> None:
    from aggregator.http.page_folders import page_folder, phone_folder
    from aggregator.security.joining import make_link

    with _fleet_session(state, task) as (session, fleet):
        is_closed = session.store.keys.is_closed()
        made = make_link(
            session.store,
            fleet=fleet,
            valid_minutes=valid_minutes,
            max_devices=_max_devices(session.store, task),
            write=session.change_keys,
            **given,
        )
    if sys.stdout.isatty():
        _print_code(str(made))
    click.echo(str(made))
    notes = [
        f"good for one device and {valid_minutes} minutes: open it on a phone, or on a box: edge-client join 'LINK'"
    ]
    if not is_closed:
        notes.append(
            "the device that uses it closes the fleet: devices that are not enrolled are refused then"
        )
    if phone_folder(page_folder()) is None:
        notes.append(
            "the page for phones is not installed here; if it is not where the aggregator runs either, a phone cannot "
            "open the link, but a box can join: install the wheel protofleet-dashboard, and restart the aggregator"
        )
    for note in notes:
        click.echo(note, err=True)


def _print_code(link: str) -> None:
    """Print a QR code, where its package is installed and the terminal has its characters: the link is enough."""
    with contextlib.suppress(ModuleNotFoundError, UnicodeEncodeError):
        import segno

        segno.make(link, error="l").terminal(compact=True)


@click.command(
    "enroll-broker",
    epilog=examples("aggregator enroll-broker broker.example 10.0.0.1 --out broker --task task.toml"),
)
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@_out_option
@_fleet_option
@state_option
@_days_option
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Port of one of several mosquittos on the broker's machine, each for a fleet: its files are in "
    "/etc/mosquitto/FLEET. Default: the only one, on 8883.",
)
def enroll_broker_command(
    *,
    hosts: tuple[str, ...],
    out: Path,
    task: Path | None,
    state: Path,
    days: int,
    port: int | None,
) -> None:
    """Create certificate, access list and configuration for a mosquitto of a closed fleet.

    HOST are the names and IP addresses under which devices reach the broker.
    """
    from aggregator.security.enrollment import enroll_broker
    from aggregator.security.mosquitto_config import FOLDER, folder_of

    with _fleet_session(state, task) as (session, fleet):
        enroll_broker(
            session.store, hosts, fleet=fleet, out=out, days=days, port=port, write=session.change_keys
        )
    if port is not None:
        click.echo(f"copy the files in {out} to {folder_of(fleet)}, and start mosquitto@{fleet}")
        return
    click.echo(f"copy the files in {out} to {FOLDER}, and mosquitto.conf over /etc/mosquitto/mosquitto.conf")


@click.command("enroll-sums", epilog=examples("aggregator enroll-sums --out sums-broker --task task.toml"))
@_out_option
@_fleet_option
@state_option
@_days_option
def enroll_sums_command(*, out: Path, task: Path | None, state: Path, days: int) -> None:
    """Create a certificate with which the second operator connects to the broker of a closed fleet."""
    from aggregator.security.enrollment import enroll_sums

    with _fleet_session(state, task) as (session, fleet):
        enroll_sums(session.store, fleet=fleet, out=out, days=days, write=session.change_keys)
    files = f"--tls-ca {out}/ca.crt --tls-cert {out}/sums.crt --tls-key {out}/sums.key"
    click.echo(f"copy {out} to the second operator's machine, and add to its `protofleet-sums run`: {files}")


@click.command("reset-key", epilog=examples("aggregator reset-key shed-1"))
@click.argument("device")
@state_option
def reset_key_command(*, device: str, state: Path) -> None:
    """Accept a new key of DEVICE, which has lost its own, in a fleet that is not closed.

    The next key that is used under the name DEVICE is stored.
    """
    from aggregator.commands.session import open_session

    with open_session(state) as session:
        for line in session.carry_out("reset-key", DeviceArguments(device)):
            click.echo(line)


@click.command(
    "rotate-key", epilog=examples("aggregator rotate-key", "aggregator rotate-key --issued new-key")
)
@click.option(
    "--issued",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Folder made by `aggregator issue-key` where the root key is kept.",
)
@state_option
def rotate_key_command(*, issued: Path | None, state: Path) -> None:
    """Replace the key that signs manifests; devices follow by themselves. Stop the aggregator first.

    Without --issued, the old key signs the new one. With it, the root key has signed the new one: from the first time
    on, devices accept only keys that this root key has signed.
    """
    from aggregator.commands.session import open_session
    from aggregator.security.key_rotation import rotate_key

    with open_session(state) as session:
        if session.is_running:
            raise ConfigError("the aggregator runs with the old key: stop it first")
        public = rotate_key(session.store, fleet=session.store.served_task().fleet, issued=issued)
    click.echo(
        f"the aggregator's key is now {public.hex()}: start the aggregator, and back up its identity folder"
    )


@click.command(
    "issue-key", epilog=examples("aggregator issue-key --root root.key --fleet orchard --out new-key")
)
@click.option(
    "--root",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="File of the root key, created if it does not exist. It is never needed on the aggregator's machine.",
)
@click.option("--fleet", required=True, help="Name of the fleet.")
@_out_option
def issue_key_command(*, root: Path, fleet: str, out: Path) -> None:
    """Create a signing key for an aggregator, signed with a root key that is kept off its machine.

    Copy the folder to the aggregator's machine, and give it to `aggregator rotate-key --issued`.
    """
    from aggregator.security.key_rotation import issue_key

    public = issue_key(root, fleet=fleet, out=out)
    click.echo(f"signed with the root key {public.hex()}; delete {out} here once it is installed")


def _max_devices(store: "Store", task: Path | None) -> int | None:
    """Return the quota of the task file, or of the task that was served last."""
    from aggregator.config.task_file import load_task
    from aggregator.storage.stored_values import ServedTask

    served = store.facts.get(ServedTask)
    if task is not None:
        return load_task(task)[0].limits.max_devices
    return served.limits.max_devices if served is not None else None


@contextlib.contextmanager
def _fleet_session(state: Path, task: Path | None) -> "Iterator[tuple[Session, str]]":
    """Open the state directory, created if missing; yield it with the fleet's name.

    Raises:
        UsageError: the fleet's name is not known.
    """
    from aggregator.commands.session import open_session
    from aggregator.config.task_file import load_task
    from aggregator.security.identity import ca_fleet, has_ca, identity_folder
    from aggregator.storage.open_store import has_database

    fleet = load_task(task)[0].fleet if task is not None else None
    if fleet is None and not has_database(state):
        raise click.UsageError(
            f"no aggregator state in {state}: give the --state of `aggregator run`, or, "
            "before its first start, --task, the fleet's task file"
        )
    had_ca = has_ca(state)
    with open_session(state, fleet=fleet or "", may_create=True) as session:
        if fleet is None and had_ca:
            fleet = ca_fleet(state)
        if fleet is None:
            try:
                fleet = session.store.served_task().fleet
            except StateError:
                raise click.UsageError(
                    "the fleet's name is not known yet: give --task, its task file"
                ) from None
        yield session, fleet
        if not had_ca and has_ca(state):
            where = identity_folder(state)
            click.echo(f"created the CA of fleet {fleet} in {where}: keep a backup of this folder", err=True)


COMMANDS = (
    enroll_command,
    enroll_broker_command,
    enroll_sums_command,
    reset_key_command,
    rotate_key_command,
    issue_key_command,
)
