"""Command lines found in pages and files, parsed by the programs that they are for, and not run."""

import shlex
from pathlib import Path

import click

from docs.generate_cli import PROGRAMS

DEPLOY = Path(__file__).parents[2] / "deploy"


def parse(line: str) -> click.Context:
    """Let a program check its command line; what would be installed in /etc/protofleet is taken from deploy/.

    Raises:
        click.ClickException: the program would refuse it.
    """
    path, *arguments = shlex.split(line.replace("/etc/protofleet", str(DEPLOY)), comments=True)
    command: click.Command = PROGRAMS[Path(path).name]
    parent = None
    if isinstance(command, click.Group) and arguments and arguments[0] in command.commands:
        parent = command.make_context(path, [], resilient_parsing=True)
        command = command.commands[arguments.pop(0)]
    return command.make_context(command.name, arguments, parent=parent)
