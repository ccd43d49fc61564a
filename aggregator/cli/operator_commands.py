"""The commands of `aggregator.http.commands` on the command line, and `aggregator take-over`."""

from pathlib import Path
from typing import Any

import click

from aggregator.cli.state import existing_state, state_option
from aggregator.http import commands
from protocol.cli import examples, plain

_ARGUMENTS = {
    "device": click.argument("device"),
    "version": click.argument("version", type=click.IntRange(min=1), required=False),
}
"""The arguments of commands by field."""

_EXAMPLES = {"device": ("shed-1",), "version": ("", "3")}


def _click_command(name: str, command: commands.Command) -> click.Command:
    def run(*, state: Path, **arguments: Any) -> None:
        with existing_state(state) as store:
            for line in command.run(store, command.arguments(**arguments)):
                click.echo(line)

    decorated, lines = state_option(run), [f"aggregator {name}"]
    for field in command.arguments.__struct_fields__:
        decorated = _ARGUMENTS[field](decorated)
        lines = [f"{lines[0]} {value}".rstrip() for value in _EXAMPLES[field]]
    return click.command(name, help=command.help, epilog=examples(*lines))(decorated)


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


COMMANDS = (
    *(_click_command(name, command) for name, command in commands.COMMANDS.items()),
    take_over_command,
)
