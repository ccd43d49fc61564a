"""How all three programs behave on a command line: settings, errors, exit codes, log lines."""

import logging
import signal
import sys
import tomllib
import types
from pathlib import Path
from typing import Any, NoReturn

import click

from protocol.errors import ProtofleetError


def _load_config(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    """Make a TOML file's values the defaults of the command's options."""
    if path is None:
        return
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.BadParameter(f"{path}: {error}") from error
    options = [option for option in context.command.params if isinstance(option, click.Option)]
    names = {option.name for option in options if option.expose_value}
    values = {key.replace("-", "_"): value for key, value in values.items()}
    if unknown := values.keys() - names:
        known = ", ".join(sorted(name for name in names if name))
        raise click.BadParameter(f"{path}: unknown setting {min(unknown)!r}; known: {known}")
    for name in {option.name for option in options if option.multiple} & values.keys():
        # One value need not be a list, as on the command line.
        values[name] = values[name] if isinstance(values[name], list) else [values[name]]
    context.default_map = {**(context.default_map or {}), **values}


config_option = click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    envvar="PROTOFLEET_CONFIG",
    callback=_load_config,
    help="TOML file with any of these options, named as here without the dashes in front.",
)

verbose_option = click.option("-v", "--verbose", is_flag=True, help="Log more.")


def start_logging(*, verbose: bool) -> None:
    """Log to stderr: one line an event, with the time."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )


def stop_on_terminate() -> None:
    """End on SIGTERM as on Ctrl-C, but with exit status 0: a service manager asked for it."""

    def stop(_number: int, _frame: types.FrameType | None) -> None:
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)


def run(command: click.Command, *, program: str) -> NoReturn:
    """Run a command: exit 0 done, 1 an expected failure as one line, 2 wrong usage, 130 interrupted."""
    try:
        code = command.main(prog_name=program, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except ProtofleetError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it flushes at exit.
        sys.stdout = None
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
