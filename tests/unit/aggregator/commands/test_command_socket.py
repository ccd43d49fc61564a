"""Tests for the socket of commands: hostile, slow and dead clients, and a socket that a killed program has left."""

import contextlib
import queue
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aggregator.commands import command_socket
from aggregator.commands.arguments import DeviceArguments, HeadArguments
from aggregator.commands.command_socket import (
    MAX_BYTES,
    MAX_CLIENTS,
    NAME,
    CommandSocket,
    Request,
    Unanswered,
    is_listening,
    send_command,
)
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from protocol.errors import ConfigError, StateError, ThreadFailed
from tests.support.fleets.command_loop import taking_commands

DEADLINE_S = 60.0


@dataclass
class Loop:
    """The thread that writes, and the socket that puts requests into its queue."""

    store: Store
    events: queue.SimpleQueue[Request | ThreadFailed] = field(default_factory=queue.SimpleQueue)
    seen: list[Request] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.store.folder

    def next(self) -> Request:
        request = self.events.get(timeout=DEADLINE_S)
        assert isinstance(request, Request)
        return request

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        opened = CommandSocket(self.folder, self.events.put)
        try:
            yield
        finally:
            opened.stop()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with taking_commands(self.store) as self.seen:
            yield


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    with contextlib.closing(open_store(tmp_path / "state", lock=True)) as store:
        for number in range(50):
            store.keys.pin(f"d-{number}", bytes(32), now_s=1.0)
        yield Loop(store)


def reset(loop: Loop, number: int = 0) -> list[str]:
    return list(send_command(loop.folder, "reset-key", DeviceArguments(f"d-{number}")))


def done(number: int = 0) -> list[str]:
    return [f"the next key used under the name d-{number} will be stored"]


def connect(loop: Loop) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(DEADLINE_S)
    client.connect(str(loop.folder / NAME))
    return client


def test_command_is_answered_with_its_sentences_or_its_error(loop: Loop) -> None:
    """Errors keep their kind: an impossible command, and a state that cannot be written."""
    with loop.running():
        assert reset(loop) == done()
        with pytest.raises(ConfigError, match="d-0 has no key stored at first use"):
            reset(loop)
        with pytest.raises(StateError, match="no task in"):
            send_command(loop.folder, "rollback", HeadArguments())
    assert not is_listening(loop.folder)
    with pytest.raises(StateError, match="has ended: repeat the command"):
        reset(loop)


def test_concurrent_commands_get_their_own_replies(loop: Loop) -> None:
    """More at once than are served at once."""
    with loop.running(), ThreadPoolExecutor(4 * MAX_CLIENTS) as pool:
        replies = list(pool.map(lambda number: reset(loop, number), range(50)))
    assert replies == [done(number) for number in range(50)]


def test_only_the_user_can_connect(loop: Loop) -> None:
    with loop.listening():
        mode = (loop.folder / NAME).stat().st_mode
        assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
    assert not (loop.folder / NAME).exists()


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4) + payload


@pytest.mark.parametrize(
    "sent",
    [
        framed(b""),
        framed(b"\x00\xff" * 99),
        framed(b'{"command": "reset-key"}'),
        framed(b'{"command": "reset-key", "arguments": {"device": "../identity"}}'),
        framed(b'{"command": "reset-key", "arguments": {"device": "d-0", "more": 1}}'),
        framed(b'{"command": "no-such", "arguments": {}}'),
        framed(b'{"command": "change-keys", "arguments": {"type": "NewKey", "device": "d-0"}}'),
        framed(b'{"command": "forget", "arguments": ' + b"[" * 60_000 + b"}"),
        (MAX_BYTES + 1).to_bytes(4),
        b"\xff" * 4096,
    ],
)
def test_hostile_bytes_are_refused_and_never_reach_the_loop(loop: Loop, sent: bytes) -> None:
    with loop.running():
        with connect(loop) as client:
            client.sendall(sent)
            size = int.from_bytes(client.recv(4, socket.MSG_WAITALL))
            reply = client.recv(size, socket.MSG_WAITALL)
        assert b'"Refused"' in reply
        assert b"not a command of this protofleet" in reply
        assert reset(loop) == done()
    assert len(loop.seen) == 1


@pytest.mark.parametrize("sent", [b"", b"\x00", framed(b"{}")[:-1]])
def test_silent_and_dead_clients_block_no_one(loop: Loop, sent: bytes) -> None:
    """Those that say nothing or a part, and those that have gone after that."""
    with loop.running(), contextlib.ExitStack() as stack:
        for _ in range(3 * MAX_CLIENTS):
            with connect(loop) as dead:
                dead.sendall(sent)
        for _ in range(MAX_CLIENTS - 1):
            stack.enter_context(connect(loop)).sendall(sent)
        assert reset(loop) == done()
    assert len(loop.seen) == 1


def test_silent_clients_are_closed(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that others are served although all places were taken."""
    monkeypatch.setattr(command_socket, "RECEIVE_S", 0.1)
    with loop.running(), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(loop)) for _ in range(2 * MAX_CLIENTS)]
        assert reset(loop) == done()
        assert [client.recv(1) for client in silent] == [b""] * len(silent)


def test_command_of_a_client_that_has_gone_is_not_carried_out(loop: Loop) -> None:
    """An operator who has interrupted a command does not expect it later."""
    with loop.listening():
        with connect(loop) as client:
            client.sendall(framed(b'{"command": "reset-key", "arguments": {"device": "d-0"}}'))
            request = loop.next()
        assert request.carry_out(loop.store) is None
    assert loop.store.keys.get("d-0") is not None


def test_end_before_the_answer_is_an_error_of_its_own(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command may be carried out or not; so it is if the aggregator does not answer."""
    with ThreadPoolExecutor(1) as pool:
        with loop.listening():
            sent = pool.submit(reset, loop)
            loop.next()
        with pytest.raises(Unanswered, match="has ended before it answered: repeat the command"):
            sent.result(DEADLINE_S)
        monkeypatch.setattr(command_socket, "ANSWER_S", 0.1)
        with loop.listening(), pytest.raises(Unanswered, match="has not answered within 0 s"):
            reset(loop)


def test_answer_is_sent_although_the_aggregator_ends(loop: Loop) -> None:
    with ThreadPoolExecutor(1) as pool:
        with loop.listening():
            sent = pool.submit(reset, loop)
            request = loop.next()
            reply = request.carry_out(loop.store)
            assert reply is not None
            request.answer(reply)
        assert sent.result(DEADLINE_S) == done()


def test_socket_that_a_killed_program_has_left_is_replaced(loop: Loop) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as left:
        left.bind(str(loop.folder / NAME))
    assert not is_listening(loop.folder)
    with loop.running():
        assert reset(loop) == done()


def test_long_paths_are_possible(tmp_path: Path) -> None:
    """The kernel allows 107 bytes."""
    folder = tmp_path / ("a" * 120) / ("b" * 120)
    assert not is_listening(folder)
    folder.mkdir(parents=True)
    assert not is_listening(folder)
    with contextlib.closing(open_store(folder, lock=True)) as store:
        store.keys.pin("d-0", bytes(32), now_s=1.0)
        loop = Loop(store)
        with loop.running():
            assert reset(loop) == done()


def test_long_path_without_proc_names_the_way_out(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.setattr(command_socket, "MAX_PATH_BYTES", 3)
    monkeypatch.setattr(command_socket, "DESCRIPTORS", Path("/nonexistent"))
    for run in (lambda: is_listening(loop.folder), lambda: CommandSocket(loop.folder, loop.events.put)):
        with pytest.raises(ConfigError, match=r"is too long for a socket .*: use another --state"):
            run()


def test_folder_in_which_no_socket_can_be_made(loop: Loop) -> None:
    (loop.folder / NAME).mkdir()
    with pytest.raises(StateError, match=r"cannot use .*commands\.sock"):
        CommandSocket(loop.folder, loop.events.put)
