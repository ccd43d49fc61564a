"""Write `docs/cli.md` out of the programs' own help: `python -m docs.generate_cli`."""

from collections.abc import Iterator
from pathlib import Path

import click

from aggregator.cli import cli as aggregator
from edge_client.cli import cli as edge_client
from export.cli import cli as export_backbone

PROGRAMS = {"edge-client": edge_client, "aggregator": aggregator, "export-backbone": export_backbone}
PAGE = Path(__file__).with_name("cli.md")
WIDTH = 100

PREFACE = """\
# The command lines

Made by `python -m docs.generate_cli` from the programs' own help; a test keeps it up to date.

Exit codes of all three: 0 done, 1 an expected failure, told in one line on stderr, 2 wrong usage, 130 interrupted.
Results go to stdout, everything else to stderr. An option with an `env var` can come from there instead, and
those of a command with `--config` from a TOML file; the command line counts before the environment, and that
before the file.
"""


def contexts(
    name: str, command: click.Command, parent: click.Context | None = None
) -> Iterator[click.Context]:
    """A command and all that are below it, each as if it had been called."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, terminal_width=WIDTH)
    yield context
    if isinstance(command, click.Group):
        for child, below in command.commands.items():
            yield from contexts(child, below, context)


def render() -> str:
    """The whole page."""
    sections = [
        f"## `{context.command_path}`\n\n```text\n{context.get_help()}\n```\n"
        for program, root in PROGRAMS.items()
        for context in contexts(program, root)
    ]
    return "\n".join([PREFACE, *sections])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
