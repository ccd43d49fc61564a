"""Command lines in pages and files, parsed by their programs and not run."""

import os
import shlex
from pathlib import Path
from unittest import mock

import click

from docs.generate_cli import PROGRAMS

DEPLOY = Path(__file__).parents[2] / "deploy"


def parse(line: str, **environment: str) -> click.Context:
    """Parse a command line, with deploy/ for /etc/protofleet; `click.ClickException` if its program would refuse it.

    An option that the program hands on to its subprocesses by the environment does not stay there.
    """
    with mock.patch.dict(os.environ, environment):
        return _parsed(line)


def parse_in_image(line: str, **environment: str) -> click.Context:
    """Parse a command line with these variables, and with those that the container image sets."""
    return parse(line, PROTOFLEET_TASK=str(DEPLOY / "task.toml"), **environment)


def _parsed(line: str) -> click.Context:
    path, *arguments = shlex.split(line.replace("/etc/protofleet", str(DEPLOY)), comments=True)
    command: click.Command = PROGRAMS[Path(path).name]
    if not isinstance(command, click.Group):
        return command.make_context(path, arguments)
    if Path(path).name == "edge-client" and arguments[0] != "--version" and arguments[0].startswith("-"):
        arguments.insert(0, "run")
    parent = command.make_context(path, [], resilient_parsing=True)
    if arguments[0] not in command.commands:
        return command.make_context(path, arguments)
    command = command.commands[arguments.pop(0)]
    return command.make_context(command.name, arguments, parent=parent)
