"""Reads the file of `aggregator dashboard`: the fleets, and where each answers."""

import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from protocol.cli import read_secret
from protocol.errors import ConfigError
from protocol.wire.topics import is_name


class Fleet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""

    url: str
    """Of its dashboard, such as `http://127.0.0.1:8081`."""
    link: str = ""
    """The address of its dashboard in a browser, if another one."""
    token_file: str = ""
    """File of the token with which its state is read, in line 1; empty where none is needed."""

    @property
    def token(self) -> str:
        """The token, read again each time; raises ConfigError if it cannot be read."""
        return read_secret(Path(self.token_file), what="token") if self.token_file else ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fleets: dict[str, Fleet]


def read_fleets(path: Path) -> dict[str, Fleet]:
    """Return the fleets by name.

    Raises:
        ConfigError: the file cannot be read, or a value is wrong.
    """
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File).fleets
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not found:
        raise ConfigError(f'{path}: expected a table for each fleet: [fleets.NAME] with url = "http://..."')
    for name, fleet in found.items():
        if not is_name(name):
            raise ConfigError(
                f"{path}: `fleets.{name}`: expected a name of 1 to 64 letters, digits, '-' or '_'"
            )
        for key in ("url", "link"):
            _check_url(path, f"fleets.{name}.{key}", getattr(fleet, key) or fleet.url)
    return found


def _check_url(path: Path, key: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in {"http", "https"} and parts.hostname and not parts.username
        is_valid = is_valid and (parts.port is None or parts.port > 0)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(f"{path}: `{key}`: expected http://HOST[:PORT] or https://HOST[:PORT]")
