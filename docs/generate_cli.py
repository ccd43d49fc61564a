"""Write `docs/cli.md` from the help of the programs: `python -m docs.generate_cli`."""

from collections.abc import Iterator
from pathlib import Path

import click

from aggregator.cli import cli as aggregator
from edge_client.cli import cli as edge_client
from export.cli import cli as export_backbone
from protofleet.cli import cli as protofleet
from sums_operator.cli import cli as sums

PROGRAMS = {
    "edge-client": edge_client,
    "aggregator": aggregator,
    "export-backbone": export_backbone,
    "protofleet": protofleet,
    "protofleet-sums": sums,
}
PAGE = Path(__file__).with_name("cli.md")
WIDTH = 100

PREFACE = """\
# Command lines

The options of `edge-client`, `aggregator`, `export-backbone`, `protofleet` and `protofleet-sums`, written by
`python -m docs.generate_cli` from their `--help`.

Exit codes: 0 success, 1 an expected error with one line on stderr, 2 wrong usage, 130 interrupted. Results are
written to stdout, everything else to stderr. An option with an `env var` can be set in the environment, and the
options of a command with `--config` in a TOML file, for `edge-client` [with a table for each
command](operations/devices.md#settings-file). The command line takes precedence over the environment, and the
environment over the file.

## Shell completion

Commands and options are completed by the Tab key after one of these lines, for bash in `~/.bashrc`, for zsh in
`~/.zshrc` and for fish in `~/.config/fish/completions/edge-client.fish`; for another program with its name, in upper
case and with `_` for `-` in the variable:

```sh
eval "$(_EDGE_CLIENT_COMPLETE=bash_source edge-client)"    # bash 4.4 or later
eval "$(_EDGE_CLIENT_COMPLETE=zsh_source edge-client)"     # zsh
_EDGE_CLIENT_COMPLETE=fish_source edge-client | source     # fish
```
"""


def contexts(
    name: str, command: click.Command, parent: click.Context | None = None
) -> Iterator[click.Context]:
    """Yield the context of a command and of all its sub-commands."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, terminal_width=WIDTH)
    yield context
    if isinstance(command, click.Group):
        for child, below in command.commands.items():
            yield from contexts(child, below, context)


def render() -> str:
    """Return the whole page."""
    sections = [
        f"## `{context.command_path}`\n\n```text\n{context.get_help()}\n```\n"
        for program, root in PROGRAMS.items()
        for context in contexts(program, root)
    ]
    return "\n".join([PREFACE, *sections])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
