"""The fleets of `aggregator dashboard`: the file that names them, and what the dashboard of each answers.

Every byte of an answer may be wrong.
"""

import http.client
import io
import socket
import ssl
import threading
import time
import tomllib
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from aggregator.status.model import Summary
from protocol.cli import read_secret
from protocol.errors import ConfigError, ProtofleetError
from protocol.wire.topics import is_name

TIMEOUT_S = 5.0
"""Seconds to connect, and seconds for a whole answer."""

MAX_BYTES = 1024**2
"""Bytes of an answer."""

AGE_S = 2.0
"""Seconds after which a fleet is asked again."""

GRACE_S = 1.0
"""Seconds to wait for answers; later ones are shown the next time."""

SLOW_S = 10.0
"""Seconds after which a fleet that has not answered is shown as such."""


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
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8-sig")), _File).fleets
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


class FleetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet of the file, and the last answer of its dashboard."""

    name: str
    link: Annotated[str, Meta(description="Address of its dashboard.")]
    problem: Annotated[str, Meta(description="Why its state is not known.")] = ""
    summary: Annotated[Summary | None, Meta(description="Null if there is a problem.")] = None


class FleetSummaries(msgspec.Struct, frozen=True):
    """All fleets, in the order of the file."""

    fleets: tuple[FleetSummary, ...]


class Summaries:
    """The fleets of a file, each asked at most every `AGE_S` seconds; one that is slow delays no other."""

    def __init__(self, fleets: dict[str, Fleet]) -> None:
        self._fleets = fleets
        self._asked: dict[str, Future[FleetSummary]] = {}
        self._asked_s: dict[str, float] = {}
        self._last: dict[str, FleetSummary] = {}

    def current(self) -> FleetSummaries:
        """Return all summaries, each of its fleet's last answer; not thread-safe."""
        now_s = time.monotonic()
        for name, fleet in self._fleets.items():
            if name not in self._asked and now_s >= self._asked_s.get(name, float("-inf")) + AGE_S:
                answer: Future[FleetSummary] = Future()
                # A daemon: the program ends without waiting for it.
                threading.Thread(target=_ask, args=(answer, name, fleet), name=name, daemon=True).start()
                self._asked[name], self._asked_s[name] = answer, now_s
        done = wait(self._asked.values(), GRACE_S).done
        for name in [name for name, asked in self._asked.items() if asked in done]:
            self._last[name] = self._asked.pop(name).result()
        return FleetSummaries(tuple(map(self._shown, self._fleets)))

    def _shown(self, name: str) -> FleetSummary:
        fleet, last = self._fleets[name], self._last.get(name)
        age_s = time.monotonic() - self._asked_s[name] if name in self._asked else 0.0
        if last is not None and age_s < SLOW_S:
            return last
        problem = f"{fleet.url} has not answered for {age_s:.0f} s"
        return FleetSummary(name=name, link=fleet.link or fleet.url, problem=problem)


def _ask(answer: Future[FleetSummary], name: str, fleet: Fleet) -> None:
    try:
        answer.set_result(summary_of(name, fleet))
    except Exception as error:
        answer.set_exception(error)


def summary_of(name: str, fleet: Fleet) -> FleetSummary:
    """Return what a fleet's dashboard answers; a summary with a problem if it does not answer as this fleet."""
    link = fleet.link or fleet.url
    problem, summary = "", None
    try:
        summary = msgspec.json.decode(_answer(fleet), type=Summary)
    except (OSError, http.client.HTTPException, ProtofleetError) as error:
        problem = f"{fleet.url} does not answer: {error}"
    except (ValueError, RecursionError) as error:  # DecodeError and others
        problem = f"{fleet.url} does not answer as a dashboard of this version: {error}"
    if summary is not None and summary.fleet != name:
        problem, summary = f"{fleet.url} is the dashboard of another fleet", None
    return FleetSummary(name=name, link=link, problem=problem, summary=summary)


class _Answer(io.RawIOBase):
    """The bytes of an answer; reading raises an error after `TIMEOUT_S`, or after `2 * MAX_BYTES`, headers included."""

    def __init__(self, source: socket.socket, stream: Any) -> None:
        self._source, self._stream = source, stream
        self._deadline_s = time.monotonic() + TIMEOUT_S
        self._left = 2 * MAX_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if (left_s := self._deadline_s - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        self._source.settimeout(left_s)
        found: int | None = self._stream.readinto(buffer)
        self._left -= found or 0
        if self._left < 0:  # http.client reads a chunk of -1 bytes to its end
            raise ProtofleetError(f"it answers more than {MAX_BYTES} bytes")
        return found

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_Answer(sock, self.fp.detach()))


def _answer(fleet: Fleet) -> bytes:
    """Return the summary that a dashboard answers; raises OSError, HTTPException or ProtofleetError."""
    parts = urlsplit(fleet.url)
    host = str(parts.hostname)
    if parts.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, parts.port, timeout=TIMEOUT_S, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT_S)
    connection.response_class = _Response
    headers = {"Authorization": f"Bearer {token}"} if (token := fleet.token) else {}
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/api/v1/summary", headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ProtofleetError(f"it answers {response.status}")
        body = response.read(MAX_BYTES + 1)
    finally:
        connection.close()
    if len(body) > MAX_BYTES:
        raise ProtofleetError(f"it answers more than {MAX_BYTES} bytes")
    return body
