"""The command line of all programs: settings, errors, exit codes and logging."""

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from protocol.errors import ConfigError, ProtofleetError, RuntimeMissing, pip_command, problem_of_system

if TYPE_CHECKING:
    from protocol.mqtt.tls import BrokerAccess

log = logging.getLogger(__name__)

_PACKAGES = ("aggregator", "edge_client", "export", "protocol", "protofleet", "sums_operator")

F = TypeVar("F", bound=Callable[..., Any])


Settings = Mapping[str, click.Parameter]
"""Options and arguments by the keys that set them in a file."""


class Commands(click.Group):
    """A group whose help has the whole first sentence of each command, where click cuts it off."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, and wrap long lines."""
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        rows = [(name, each.get_short_help_str(limit=1000)) for name, each in commands if not each.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def settings_of(command: click.Command) -> dict[str, click.Parameter]:
    """Return what a file can set of a command, by keys with `_` for `-`."""
    found: dict[str, click.Parameter] = {}
    for each in command.params:
        if isinstance(each, click.Argument):
            if each.nargs == 1:
                found[str(each.name)] = each
        elif not each.is_eager:  # --config and --version
            found |= {_key(text): each for text in each.opts if text.startswith("--")}
    return found


def _key(text: str) -> str:
    return text.removeprefix("--").replace("-", "_")


def read_settings(
    context: click.Context, file: Path, tables: Mapping[str, Settings]
) -> dict[str, dict[str, Any]]:
    """Read a TOML file: for each of its tables values for `default_map`; those outside of a table are in table "".

    Raises:
        BadParameter: the file cannot be read, has another table or key, or a value that its option refuses.
    """
    import tomllib

    try:
        values: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise click.BadParameter(f"{file}: {error}") from error
    for name, each in values.items():
        if isinstance(each, dict) and name not in tables and _key(name) not in tables[""]:
            known = ", ".join(f"[{table}]" for table in sorted(filter(None, tables)))
            raise click.BadParameter(f"{file}: unknown table [{name}]{known and f'; known: {known}'}")
    found = {name: each for name, each in values.items() if name and name in tables}
    found[""] = {name: each for name, each in values.items() if name not in found}
    checked: dict[str, dict[str, Any]] = {}
    for table, settings in found.items():
        where = f"{file}: [{table}]" if table else f"{file}:"
        if not isinstance(settings, dict):
            raise click.BadParameter(f"{where} is a table of settings, got {settings!r}")
        for name in settings:
            if _key(name) not in tables[table]:
                places = [f"[{place}]" for place, known in tables.items() if place and _key(name) in known]
                known = f"known: {', '.join(sorted(tables[table]))}"
                hint = f"put it into {' or '.join(places)}" if places else known
                raise click.BadParameter(f"{where} unknown setting {name!r}; {hint}")
        checked[table] = _checked(context, where, settings, tables[table])
    return checked


def _checked(
    context: click.Context, where: str, values: Mapping[str, Any], known: Settings
) -> dict[str, Any]:
    """Return the values of a table by their parameters, as texts, and as lists of repeatable options."""
    checked: dict[str, Any] = {}
    for name, value in values.items():
        option = known[_key(name)]
        given = value if isinstance(value, list) else [value]
        if any(isinstance(each, dict | list) for each in given) or (value is given and not option.multiple):
            raise click.BadParameter(f"{where} {name}: expected one value, got {value!r}")
        texts = list(map(str, given))
        checked[str(option.name)] = text = texts if option.multiple else texts[0]
        try:
            option.type_cast_value(context, text)
        except click.BadParameter as error:
            raise click.BadParameter(f"{where} {name}: {error.message}") from error
    return checked


def _load_config(context: click.Context, _parameter: click.Parameter, file: Path | None) -> None:
    """Use the values in a TOML file as defaults of the command's options."""
    if file is not None:
        context.default_map = read_settings(context, file, {"": settings_of(context.command)})[""]


_PREFIX = "PROTOFLEET_"


def _variable(option: str, prefix: str = _PREFIX) -> str:
    return prefix + option.lstrip("-").replace("-", "_").upper()


def setting(*names: str, **details: Any) -> Callable[[F], F]:
    """Return an option that can also be set by an environment variable; its default is shown if it has one."""
    variable = _variable(names[0])
    shown = details.get("default") is not None
    return click.option(*names, **{"envvar": variable, "show_envvar": True, "show_default": shown, **details})


_file = click.Path(dir_okay=False, path_type=Path)


def config_option_of(
    load: Callable[[click.Context, click.Parameter, Path | None], None], *, text: str
) -> Callable[[F], F]:
    """Return the option --config, whose file `load` reads into the context's `default_map`."""
    return click.option(
        "--config",
        type=_file,
        is_eager=True,
        expose_value=False,
        envvar="PROTOFLEET_CONFIG",
        callback=load,
        help=text,
    )


config_option = config_option_of(
    _load_config, text="TOML file with any of these options, without the leading dashes."
)

_ACCESS_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--tls", {"is_flag": True, "help": "Use TLS, and verify the broker with the authorities of this system."}),
    ("--tls-ca", {"type": _file, "help": "Use TLS, and verify the broker with the authorities (PEM) in this file."}),
    ("--tls-cert", {"type": _file, "help": "Client certificate (PEM), if the broker requires one."}),
    ("--tls-key", {"type": _file, "help": "Private key of --tls-cert (PEM, without a password)."}),
    ("--username", {"help": "User name, if the broker requires a password."}),
    ("--password-file", {"type": _file, "help": "File with the password in line 1; or set {password}."}),
)  # fmt: skip


def access_options(command: F, *, prefix: str = _PREFIX) -> F:
    """Add the options of `read_access` to a command, each with an environment variable.

    The variables of another broker than the fleet's have a prefix of their own, so that the fleet's credentials are not
    sent there.
    """
    password = _variable("password", prefix)
    for name, details in reversed(_ACCESS_OPTIONS):
        text = details["help"].format(password=password)
        command = setting(name, **{**details, "help": text, "envvar": _variable(name, prefix)})(command)
    return command


def read_access(
    *, tls: bool, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, username: str | None,
    password_file: Path | None, prefix: str = _PREFIX,
) -> "BrokerAccess":  # fmt: skip
    """Return the TLS settings and credentials in the options of `access_options`, which got the same prefix.

    Raises:
        UsageError: an option requires another one.
        ConfigError: the password file cannot be read.
    """
    from protocol.mqtt.tls import BrokerAccess, readable_by_others

    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key require each other: give both, or neither")
    password = given_secret(
        password_file, variable=(variable := _variable("password", prefix)), what="password"
    )
    if password_file is not None and (warning := readable_by_others(password_file)):
        log.warning("%s", warning)
    if password is not None and username is None:
        raise click.UsageError("a password requires a user name: give --username")
    if username is not None and password is None:
        text = f"a user name requires a password: give --password-file, or set {variable}, which may be empty"
        raise click.UsageError(text)
    return BrokerAccess(
        tls=tls or tls_ca is not None or tls_cert is not None,
        ca=tls_ca,
        certificate=tls_cert,
        key=tls_key,
        username=username,
        password=password,
    )


def read_secret(file: Path, *, what: str) -> str:
    """Return the first line of a file in UTF-8; raises ConfigError if it cannot be read or is empty."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"cannot read the {what} in {file}: {reason}") from error
    if not lines or not lines[0]:
        raise ConfigError(f"expected a {what} in the first line of {file}, which is empty")
    return lines[0]


def given_secret(file: Path | None, *, variable: str, what: str) -> str | None:
    """Return the first line of a file, or of an environment variable, which often ends with a line break; or None.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if file is not None:
        return read_secret(file, what=what)
    value = os.environ.get(variable)
    return value.partition("\n")[0].rstrip("\r") if value is not None else None


MIN_TOKEN = 16
"""Characters of an HTTP server's token."""


def given_token(file: Path | None, *, variable: str) -> str:
    """Return the token in a file, or in an environment variable; empty if there is none.

    Raises:
        ConfigError: the file cannot be read, or the token is too short.
    """
    token = given_secret(file, variable=variable, what="token")
    if token is None:
        return ""
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"expected a token of at least {MIN_TOKEN} characters, got {len(token)}: "
            "make one with `openssl rand -hex 32`"
        )
    return token


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
    if text.isprintable():
        return text
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
        if not (problem := problem_of(error, extras)):
            raise
        _show_error(problem)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def problem_of(error: Exception, extras: str | None) -> str:
    """Return an expected failure in one line; empty for an error of the program."""
    if isinstance(error, ProtofleetError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        return _not_installed(name, extras) if extras and name and name not in _PACKAGES else ""
    if problem := problem_of_system(error):
        log.debug("the system failed", exc_info=error)
    return problem
