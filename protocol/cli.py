"""The command line of all programs: settings, errors, exit codes and logging."""

import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from protocol.errors import ConfigError, ProtofleetError, RuntimeMissing, pip_command, problem_of_system

if TYPE_CHECKING:
    from protocol.mqtt.tls import BrokerAccess

log = logging.getLogger(__name__)

_PACKAGES = ("aggregator", "edge_client", "export", "protocol", "protofleet", "sums_operator")

F = TypeVar("F", bound=Callable[..., Any])


def _load_config(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    """Use the values in a TOML file as defaults of the command's options."""
    if path is None:
        return
    import tomllib

    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise click.BadParameter(f"{path}: {error}") from error
    options = {
        text.removeprefix("--").replace("-", "_"): option
        for option in context.command.params
        if isinstance(option, click.Option) and (option.expose_value or option.name == "log_format")
        for text in option.opts
        if text.startswith("--")
    }
    values = {key.replace("-", "_"): value for key, value in values.items()}
    if unknown := values.keys() - options.keys():
        known = ", ".join(sorted(options))
        raise click.BadParameter(f"{path}: unknown setting {min(unknown)!r}; known: {known}")
    context.default_map = dict(context.default_map or {})
    for key, value in values.items():
        is_single = options[key].multiple and not isinstance(value, list)  # may be given without a list
        context.default_map[str(options[key].name)] = [value] if is_single else value


def setting(*names: str, **details: Any) -> Callable[[F], F]:
    """Return an option that can also be set by an environment variable; its default is shown if it has one."""
    variable = "PROTOFLEET_" + names[0].lstrip("-").replace("-", "_").upper()
    shown = details.get("default") is not None
    return click.option(*names, **{"envvar": variable, "show_envvar": True, "show_default": shown, **details})


config_option = click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    envvar="PROTOFLEET_CONFIG",
    callback=_load_config,
    help="TOML file with any of these options, without the leading dashes.",
)

_file = click.Path(dir_okay=False, path_type=Path)

_ACCESS_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--tls", {"is_flag": True, "help": "Use TLS, and verify the broker with the authorities of this system."}),
    ("--ca", {"type": _file, "help": "Use TLS, and verify the broker with the authorities (PEM) in this file."}),
    ("--cert", {"type": _file, "help": "Client certificate (PEM), if the broker requires one."}),
    ("--key", {"type": _file, "help": "Private key of --cert (PEM, without a password)."}),
    ("--username", {"help": "User name, if the broker requires a password."}),
    ("--password-file", {"type": _file, "help": "File with the password in line 1; or set PROTOFLEET_PASSWORD."}),
)  # fmt: skip


def access_options(command: F) -> F:
    """Add the options of `read_access` to a command, each with an environment variable."""
    for name, details in reversed(_ACCESS_OPTIONS):
        command = setting(name, **details)(command)
    return command


def read_access(
    *, tls: bool, ca: Path | None, cert: Path | None, key: Path | None, username: str | None,
    password_file: Path | None,
) -> "BrokerAccess":  # fmt: skip
    """Return the TLS settings and credentials in the options of `access_options`.

    Raises:
        UsageError: an option requires another one.
        ConfigError: the password file cannot be read.
    """
    from protocol.mqtt.tls import BrokerAccess, readable_by_others

    if (cert is None) != (key is None):
        raise click.UsageError("--cert and --key require each other: give both, or neither")
    password = os.environ.get("PROTOFLEET_PASSWORD")
    if password_file is not None:
        password = read_secret(password_file, what="password")
        if warning := readable_by_others(password_file):
            log.warning("%s", warning)
    if password is not None and username is None:
        raise click.UsageError("a password requires a user name: give --username")
    return BrokerAccess(
        tls=tls or ca is not None or cert is not None,
        ca=ca,
        certificate=cert,
        key=key,
        username=username,
        password=password,
    )


def read_secret(file: Path, *, what: str) -> str:
    """Return the first line of a file; raises ConfigError if it cannot be read or is empty."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()  # Windows writes a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"cannot read the {what} in {file}: {reason}") from error
    if not lines or not lines[0]:
        raise ConfigError(f"expected a {what} in the first line of {file}, which is empty")
    return lines[0]


_LOG_FORMAT = "PROTOFLEET_LOG_FORMAT"

_HANDLER = "protofleet"


def _choose_log_format(_context: click.Context, _option: click.Parameter, value: str) -> None:
    """Store the format where this program's subprocesses find it, too."""
    if value and value != os.environ.get(_LOG_FORMAT, "text"):
        os.environ[_LOG_FORMAT] = value


def verbose_option(command: F) -> F:
    """Add --verbose and --log-format, which `start_logging` reads, to a command."""
    command = click.option("-v", "--verbose", is_flag=True, help="Log debug messages.")(command)
    return setting(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        expose_value=False,
        callback=_choose_log_format,
        help="Log lines as text, or as one JSON object each.",
    )(command)


def examples(*lines: str) -> str:
    """Return the end of a command's help: command lines, as they are typed."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def plain(text: str) -> str:
    r"""Return a text with unprintable characters escaped as in Python (`\x1b`, `\n`, `\u202e`).

    Received texts could otherwise control the terminal or forge log lines.
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number of things in words: `1 prototype`, `2 prototypes`; `plural` is `noun` with an s by default."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def say(text: str, *, err: bool = False) -> None:
    """Print one line to stdout or stderr."""
    click.echo(plain(text), err=err)


class _OneLine(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return plain(super().formatMessage(record))


def start_logging(*, verbose: bool) -> None:
    """Log to stderr, one line per event: local date and time, level, logger and message, or JSON with --log-format.

    `verbose` adds this project's debug events. Those of libraries stay off: Pillow logs an image's metadata, GPS
    position included.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.name = _HANDLER
    if os.environ.get(_LOG_FORMAT) == "json":
        from protocol.log import JsonLines

        handler.setFormatter(JsonLines())
    else:
        form = "%(asctime)s %(levelname)s %(name)s %(message)s"
        handler.setFormatter(_OneLine(form, datefmt="%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(logging.DEBUG if verbose else logging.NOTSET)


def _is_logging() -> bool:
    ours = [each for each in logging.getLogger().handlers if each.name == _HANDLER]
    return any(isinstance(each, logging.StreamHandler) and each.stream is sys.stderr for each in ours)


def _show_error(text: str) -> None:
    """Print the error that ends the program, or log it where the log is JSON."""
    if _is_logging() and os.environ.get(_LOG_FORMAT) == "json":
        log.error("%s", text)
    else:
        say(f"error: {text}", err=True)


def require_packages(*modules: str, extras: str) -> None:
    """Raise RuntimeMissing unless packages are installed, without importing them."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise RuntimeMissing(_not_installed(name, extras))


def _not_installed(name: str, extras: str) -> str:
    return f"{name} is not installed: {pip_command(extras)}"


def run(command: click.Command, *, program: str, extras: str | None = None) -> NoReturn:
    """Run a command: exit status 0 done, 1 expected failure as one line, 2 usage error, 130 interrupted.

    `extras` are those of the package that the program needs, for the error if a package is missing.
    """
    try:
        code = command.main(prog_name=program, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        if _is_logging():
            log.info("interrupted")
        else:
            click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe has ended; without stdout, Python does not fail again on the flush at exit.
        sys.stdout = None
        sys.exit(1)
    except Exception as error:
        if not (problem := _problem(error, extras)):
            raise
        _show_error(problem)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _problem(error: Exception, extras: str | None) -> str:
    """Return an expected failure in one line; empty for an error of the program."""
    if isinstance(error, ProtofleetError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        return _not_installed(name, extras) if extras and name and name not in _PACKAGES else ""
    if problem := problem_of_system(error):
        log.debug("the system failed", exc_info=error)
    return problem
