"""The socket `STATE/commands.sock`, on which the running aggregator is sent commands.

A request and its reply are JSON, each after its length in four bytes. Only the user of the state directory can connect.
"""

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal

import msgspec

from aggregator.commands.writes import WRITES
from aggregator.storage.store import Store
from protocol.errors import ConfigError, StateError, ThreadFailed
from protocol.log import event
from protocol.storage.blobstore import state_errors
from protocol.threads import start_thread

log = logging.getLogger(__name__)

NAME = "commands.sock"

MAX_PATH_BYTES = 100
"""Of a socket's path: Linux allows 107, macOS 103."""

DESCRIPTORS = Path("/proc/self/fd")
"""Through which Linux reaches a directory by a short path."""

MAX_BYTES = 64 * 1024
"""Of a request or a reply."""

MAX_CLIENTS = 8
"""Clients that are served at once; others wait."""

RECEIVE_S = 5.0
"""Time for a client to send its request, and to read the reply."""

ANSWER_S = 60.0
"""Time for the aggregator to answer a client."""

STOP_S = 1.0
"""Time for replies to be sent when the aggregator ends."""


class _Sent(msgspec.Struct, frozen=True):
    """A request."""

    command: str
    arguments: msgspec.Raw


class Done(msgspec.Struct, frozen=True, tag=True):
    """A command was carried out; what to print."""

    sentences: tuple[str, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A command was not carried out."""

    kind: Literal["ConfigError", "StateError"]
    reason: str


class Unanswered(StateError):
    """The aggregator has ended before it answered, so that a command may be carried out or not."""


@dataclass(frozen=True)
class Request:
    """A client's command, for the thread that writes the tables."""

    command: str
    arguments: msgspec.Struct
    client: socket.socket
    replies: queue.SimpleQueue[Done | Refused]

    def carry_out(self, store: Store) -> Done | None:
        """Write what the command changes, unless the client is gone; return the reply to send with `answer`.

        Return None if there is nothing to answer any more: a command that is impossible is refused here. Raises
        StateError, after it was answered, if the state cannot be written.
        """
        # It has closed the connection, or sends more than a request; or the request is of an earlier run.
        if self.client.fileno() < 0 or wait([self.client], 0):
            return None
        try:
            done = Done(tuple(WRITES[self.command].run(store, self.arguments) or ()))
        except ConfigError as error:
            self.answer(Refused("ConfigError", str(error)))
            return None
        except StateError as error:
            self.answer(Refused("StateError", str(error)))
            raise
        event(log, logging.INFO, "command carried out", command=self.command)
        return done

    def answer(self, reply: Done | Refused) -> None:
        self.replies.put(reply)


class CommandSocket:
    """Listens for commands in a state directory whose lock this program holds.

    Args:
        folder: the state directory.
        on_request: called from threads of clients; it must only enqueue the request.

    Raises:
        ConfigError: the directory's path is too long for a socket.
        StateError: the socket cannot be made.
    """

    def __init__(self, folder: Path, on_request: Callable[[Request | ThreadFailed], None]) -> None:
        self._file = folder / NAME
        self._on_request = on_request
        self._stopped = threading.Event()
        self._room = threading.Semaphore(MAX_CLIENTS)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with state_errors(self._file), _address(folder) as address:
                self._file.unlink(missing_ok=True)  # of a program that was killed
                self._listening.bind(address)
                self._file.chmod(0o600)  # before anything can connect
                self._listening.listen(128)
            start_thread(self._accept, name="commands", on_failure=on_request)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Accept no more commands, and let replies be sent that are due."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listening.close()
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)
        deadline_s = time.monotonic() + STOP_S
        for _ in range(MAX_CLIENTS):
            self._room.acquire(timeout=max(0.0, deadline_s - time.monotonic()))

    def _accept(self) -> None:
        while not self._stopped.is_set():
            self._room.acquire()
            try:
                client, _ = self._listening.accept()
                start_thread(partial(self._talk, client), name="command", on_failure=self._on_request)
            except (OSError, ThreadFailed):  # too many files or threads, or the end
                self._room.release()
                self._stopped.wait(0.1)

    def _talk(self, client: socket.socket) -> None:
        """Receive a client's request, wait until it is answered, and send the reply."""
        try:
            # A client that is gone gets no reply.
            with client, contextlib.suppress(OSError, EOFError):
                reply = self._reply(client)
                if reply is not None:
                    _send(client, msgspec.json.encode(reply), time.monotonic() + RECEIVE_S)
        finally:
            self._room.release()

    def _reply(self, client: socket.socket) -> Done | Refused | None:
        """Return the reply; None if the aggregator ends before there is one."""
        try:
            sent = msgspec.json.decode(_receive(client, time.monotonic() + RECEIVE_S), type=_Sent)
            kind = WRITES[sent.command].arguments
            arguments = msgspec.json.decode(sent.arguments, type=kind)
        except (ValueError, KeyError, msgspec.MsgspecError, RecursionError) as error:
            return Refused("ConfigError", f"not a command of this protofleet: {error}")
        request = Request(sent.command, arguments, client, queue.SimpleQueue())
        self._on_request(request)
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Empty):
                return request.replies.get(timeout=0.1)
        with contextlib.suppress(queue.Empty):
            return request.replies.get_nowait()
        return None


def is_listening(folder: Path) -> bool:
    """Return True if a running aggregator takes commands in a state directory.

    Raises:
        ConfigError: the directory's path is too long for a socket.
        StateError: this user cannot connect.
    """
    with _connected(folder) as client:
        return client is not None


def send_command(folder: Path, command: str, arguments: msgspec.Struct) -> Sequence[str]:
    """Have the running aggregator carry out a command; return what to print.

    Raises:
        ConfigError: the command is impossible.
        Unanswered: the aggregator has ended, or does not answer.
        StateError: no aggregator runs, or it cannot write the state.
    """
    request = _Sent(command, msgspec.Raw(msgspec.json.encode(arguments)))
    with _connected(folder) as client:
        if client is None:
            raise StateError(f"the aggregator on {folder} has ended: repeat the command")
        deadline_s = time.monotonic() + ANSWER_S
        try:
            _send(client, msgspec.json.encode(request), deadline_s)
            reply: Done | Refused = msgspec.json.decode(_receive(client, deadline_s), type=Done | Refused)
        except TimeoutError:
            text = f"the aggregator on {folder} has not answered within {ANSWER_S:.0f} s: see its log"
            raise Unanswered(text) from None
        except (OSError, EOFError, ValueError, msgspec.MsgspecError):
            text = f"the aggregator on {folder} has ended before it answered: repeat the command"
            raise Unanswered(text) from None
    if isinstance(reply, Refused):
        raise (ConfigError if reply.kind == "ConfigError" else StateError)(reply.reason)
    return reply.sentences


@contextlib.contextmanager
def _connected(folder: Path) -> Iterator[socket.socket | None]:
    """Connect to a running aggregator; yields None if there is none."""
    if not folder.is_dir():
        yield None
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        is_connected = True
        with _address(folder) as address, state_errors(folder / NAME):
            try:
                client.connect(address)
            except (FileNotFoundError, ConnectionRefusedError):
                is_connected = False
        yield client if is_connected else None


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield the socket's path; a long one through an open directory, since the length is limited."""
    if len(os.fsencode(folder / NAME)) <= MAX_PATH_BYTES:
        yield str(folder / NAME)
        return
    if not DESCRIPTORS.is_dir():
        raise ConfigError(
            f"the path {folder / NAME} is too long for a socket (at most {MAX_PATH_BYTES} bytes): use another --state"
        )
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"{DESCRIPTORS}/{directory}/{NAME}"
    finally:
        os.close(directory)


def _send(peer: socket.socket, data: bytes, deadline_s: float) -> None:
    peer.settimeout(max(deadline_s - time.monotonic(), 0.001))
    peer.sendall(len(data).to_bytes(4) + data)


def _receive(peer: socket.socket, deadline_s: float) -> bytes:
    """Return what a peer has sent.

    Raises:
        OSError: it is gone, or has not sent all by the deadline.
        EOFError: it has closed the connection.
        ValueError: it is too large.
    """
    size = int.from_bytes(_receive_exactly(peer, 4, deadline_s))
    if size > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES} bytes, got {size}")
    return _receive_exactly(peer, size, deadline_s)


def _receive_exactly(peer: socket.socket, size: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < size:
        peer.settimeout(max(deadline_s - time.monotonic(), 0.001))
        part = peer.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
