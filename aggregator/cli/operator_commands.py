"""The commands of `aggregator.http.commands` on the command line, and `aggregator take-over`."""

from pathlib import Path
from typing import Any

import click

from aggregator.cli.state import state_option
from aggregator.commands.arguments import NoArguments
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
        from aggregator.commands.session import open_session

        with open_session(state) as session:
            for line in command.run(session, command.arguments(**arguments)):
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
    from aggregator.commands.session import open_session

    with open_session(state) as session:
        for line in session.carry_out("take-over", NoArguments()):
            click.echo(plain(line))


COMMANDS = (
    *(_click_command(name, command) for name, command in commands.COMMANDS.items()),
    take_over_command,
)
