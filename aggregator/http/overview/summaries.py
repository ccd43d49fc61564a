"""The overview's summary of a fleet, read from `/api/v1/status` of its dashboard, whose every byte may be wrong."""

import http.client
import io
import socket
import ssl
import threading
import time
from concurrent.futures import Future, wait
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from aggregator.http.overview.fleets_file import Fleet
from aggregator.status.model import Quotas
from protocol.errors import ProtofleetError

TIMEOUT_S = 5.0
"""Seconds to connect, and seconds for a whole answer."""

MAX_BYTES = 64 * 1024**2
"""Bytes of an answer: a status of 10,000 devices has 6 MB."""

AGE_S = 2.0
"""Seconds after which a fleet is asked again."""

GRACE_S = 1.0
"""Seconds to wait for answers; later ones are shown the next time."""

SLOW_S = 10.0
"""Seconds after which a fleet that has not answered is shown as such."""

NEARLY = 0.9

Count = Annotated[int, Meta(ge=0)]


class FleetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet in a line."""

    name: str
    link: Annotated[str, Meta(description="Address of its dashboard.")]
    problem: Annotated[str, Meta(description="Why its state is not known; then all else is empty.")] = ""
    running: bool = False
    algorithm: str = ""
    devices: Count = 0
    online: Count = 0
    submissions: Count = 0
    head: Annotated[Count, Meta(description="Version of the current head; 0 if there is none.")] = 0
    accuracy: Annotated[float | None, Meta(description="Of the current head, on all held-out images.")] = None
    quotas: Quotas | None = None
    attention: Annotated[tuple[str, ...], Meta(description="What needs an operator.")] = ()


class FleetSummaries(msgspec.Struct, frozen=True):
    """All fleets, in the order of the file."""

    fleets: tuple[FleetSummary, ...]


class _Device(msgspec.Struct):
    device: str
    state: str
    problem: str


class _HeldOut(msgspec.Struct):
    accuracy: float | None


class _Head(msgspec.Struct):
    version: int
    held_out: _HeldOut


class _Intake(msgspec.Struct):
    stopped_s: float | None


class _Rollout(msgspec.Struct):
    current: Count


class _Quarantined(msgspec.Struct):
    device: str
    released_s: float | None


class _Failures(msgspec.Struct):
    failures: int


class _Status(msgspec.Struct):
    """The part of a status that is shown."""

    fleet: str
    algorithm: Annotated[str, Meta(max_length=64)]
    running: bool
    intake: _Intake
    submissions: Count
    devices: list[_Device]
    heads: list[_Head]
    rollout: _Rollout
    quarantine: list[_Quarantined]
    failed_training: _Failures | None
    quotas: Quotas


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
    try:
        status = msgspec.json.decode(_answer(fleet), type=_Status)
    except (OSError, http.client.HTTPException, ProtofleetError) as error:
        return FleetSummary(name=name, link=link, problem=f"{fleet.url} does not answer: {error}")
    except (ValueError, RecursionError) as error:  # DecodeError and others
        problem = f"{fleet.url} does not answer as a dashboard of this version: {error}"
        return FleetSummary(name=name, link=link, problem=problem)
    if status.fleet != name:
        return FleetSummary(name=name, link=link, problem=f"{fleet.url} is the dashboard of another fleet")
    current = next((head for head in status.heads if head.version == status.rollout.current), None)
    return FleetSummary(
        name=name,
        link=link,
        running=status.running,
        algorithm=status.algorithm,
        devices=len(status.devices),
        online=sum(device.state == "online" for device in status.devices),
        submissions=status.submissions,
        head=status.rollout.current,
        accuracy=current.held_out.accuracy if current is not None else None,
        quotas=status.quotas,
        attention=tuple(_attention(status)),
    )


def _attention(status: _Status) -> list[str]:
    valid = {each.device for each in status.devices if each.state != "revoked"}
    quarantined = len(valid & {each.device for each in status.quarantine if each.released_s is None})
    problems = sum(bool(device.problem) for device in status.devices)
    full = [
        field
        for field in Quotas.__struct_fields__
        if (quota := getattr(status.quotas, field)).limit is not None and quota.used >= NEARLY * quota.limit
    ]
    found = {
        "the aggregator is not running": not status.running,
        "uploads are not stored": status.intake.stopped_s is not None,
        f"the next head has failed {status.failed_training and status.failed_training.failures} times":
            status.failed_training is not None,
        f"quarantined devices: {quarantined}": quarantined,
        f"devices that cannot take part: {problems}": problems,
        f"quota nearly used up: {', '.join(full)}": full,
    }  # fmt: skip
    return [text for text, holds in found.items() if holds]


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
    """Return the status that a dashboard answers; raises OSError, HTTPException or ProtofleetError."""
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
        connection.request("GET", f"{parts.path.rstrip('/')}/api/v1/status", headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ProtofleetError(f"it answers {response.status}")
        body = response.read(MAX_BYTES + 1)
    finally:
        connection.close()
    if len(body) > MAX_BYTES:
        raise ProtofleetError(f"it answers more than {MAX_BYTES} bytes")
    return body
