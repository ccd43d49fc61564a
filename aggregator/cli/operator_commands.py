"""`aggregator status`, `rollback`, `promote`, `release`, `forget` and `take-over`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from aggregator.cli.state import EXTRAS, existing_state, state_option
from protocol.cli import examples, plain, require_packages

if TYPE_CHECKING:
    from aggregator.coordination.rollout_events import CommandKind


@click.command("status", epilog=examples("aggregator status", "aggregator status --json"))
@state_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as in docs/status.schema.json.")
def status_command(*, state: Path, as_json: bool) -> None:
    """Show devices, submissions, covered classes and heads."""
    if not as_json:
        require_packages("rich", extras=EXTRAS)
    from aggregator.status.collect import collect_status
    from aggregator.storage.open_store import open_store

    status = collect_status(open_store(state, read_only=True))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(status), indent=2))
        return
    from rich.console import Console

    from aggregator.status.render import render_status

    # Without a terminal there is no width to wrap at.
    render_status(status, Console(width=None if sys.stdout.isatty() else 200))


@click.command("rollback", epilog=examples("aggregator rollback", "aggregator rollback 3"))
@click.argument("version", type=click.IntRange(min=1), required=False)
@state_option
def rollback_command(*, version: int | None, state: Path) -> None:
    """Make head VERSION current again; without VERSION, the previous head.

    All devices return to it and a candidate is rejected. Heads trained later are rolled out as usual.
    """
    _command(state, "rollback", version)


@click.command("promote", epilog=examples("aggregator promote"))
@state_option
def promote_command(*, state: Path) -> None:
    """Roll the candidate out to all devices without waiting for its canaries."""
    _command(state, "promote")


@click.command("release", epilog=examples("aggregator release shed-1"))
@click.argument("device")
@state_option
def release_command(*, device: str, state: Path) -> None:
    """Release DEVICE from quarantine.

    Its prototypes are used for training from now on, whatever it uploads, until it is revoked.
    """
    from aggregator.heads.operator_commands import release

    with existing_state(state) as store:
        click.echo(release(store, device))


@click.command("forget", epilog=examples("aggregator forget shed-1"))
@click.argument("device")
@state_option
def forget_command(*, device: str, state: Path) -> None:
    """Delete the submissions of DEVICE, and make the head again without them.

    It stays enrolled and may upload again: to prevent that, revoke it first.
    """
    from aggregator.heads.forgotten_devices import forget

    with existing_state(state) as store:
        for line in forget(store, device):
            click.echo(line)


@click.command("take-over", epilog=examples("aggregator take-over"))
@state_option
def take_over_command(*, state: Path) -> None:
    """Continue with this state, although another aggregator with its key was started later.

    The other aggregator stays out as soon as this one runs.
    """
    from msgspec.structs import replace

    from protocol.wire.presence import Duplicate

    with existing_state(state) as store, store.transaction():
        found, served = store.facts.get(Duplicate), store.served_task()
        if found is None:
            click.echo("no other aggregator with this key has been seen: nothing to do")
            return
        store.facts.delete(Duplicate)
        store.facts.put(replace(served, epoch=max(served.epoch, found.epoch)))
    click.echo(
        plain(f"this state continues at the next start; the aggregator at {found.where} stays out then")
    )


def _command(state: Path, kind: "CommandKind", version: int | None = None) -> None:
    from aggregator.heads.operator_commands import submit_command

    with existing_state(state) as store:
        click.echo(submit_command(store, kind, version))


COMMANDS = (
    status_command,
    rollback_command,
    promote_command,
    release_command,
    forget_command,
    take_over_command,
)
