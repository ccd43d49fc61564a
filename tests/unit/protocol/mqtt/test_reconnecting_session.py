"""The MQTT session with real brokers: connects, reconnects, keeps order, and retries with a delay."""

import gc
import os
import resource
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from protocol.errors import ThreadFailed
from protocol.mqtt import client, reconnect_delay, reconnecting_session
from protocol.mqtt.client import SUBSCRIBE_ATTEMPTS
from protocol.mqtt.reconnecting_session import (
    BrokerAddress,
    Connected,
    Disconnected,
    Drained,
    Outgoing,
    Received,
)
from tests.conftest import Serve
from tests.support.network.brokers import free_address, mosquitto, needs_mosquitto
from tests.support.network.sessions import TIMEOUT_S, leaked, listening, running

pytestmark = pytest.mark.usefixtures("short_pauses")

FD_SETSIZE = 1024


def test_more_messages_than_the_window_arrive_in_order(broker: BrokerAddress) -> None:
    count = 300
    with running(broker, "b", "t") as (_, hears), running(broker, "a", window=4) as (says, ear):
        hears.wait(Connected)
        ear.wait(Connected)
        for number in range(count):
            says.send(Outgoing("t", number.to_bytes(2, "big") + bytes(2000)))
        got = [int.from_bytes(hears.wait(Received).payload[:2], "big") for _ in range(count)]
        assert got == list(range(count))
        ear.wait(Drained)


def test_retained_message_reaches_later_subscriber(broker: BrokerAddress) -> None:
    with running(broker, "a") as (says, ear):
        ear.wait(Connected)
        says.send(Outgoing("t/lost", b"1"))
        says.send(Outgoing("t/kept", b"2", retain=True))
        ear.wait(Drained)
        with running(broker, "b", "t/+") as (_, hears):
            kept = hears.wait(Received)
            assert (kept, kept.retained) == (Received("t/kept", b"2"), True)
            assert Received("t/lost", b"1") not in hears.rest()
            says.send(Outgoing("t/kept", b"3", retain=True))
            said = hears.wait(Received)
            assert (said, said.retained) == (Received("t/kept", b"3"), False)


def test_messages_of_unsubscribed_topics_are_ignored(broker: BrokerAddress) -> None:
    with running(broker, "other", "theirs") as (other, other_ear):
        other_ear.wait(Connected)
        other.send(Outgoing("theirs", b"to the other", retain=True))
        other.send(Outgoing("ours/1", b"to us", retain=True))
        other_ear.wait(Drained)
        with running(broker, "newcomer", "ours/+") as (_, ear):
            received = [ear.wait(Received)]
            other.send(Outgoing("ours/2", b"the end"))
            while received[-1].topic != "ours/2":
                received.append(ear.wait(Received))
    assert {event.topic for event in received} == {"ours/1", "ours/2"}


def test_session_reconnects_and_resubscribes(serve: Serve, address: BrokerAddress) -> None:
    with running(address, "a", "t") as (says, ear):
        assert f"no broker at {address}" in ear.wait(Disconnected).reason
        for _ in range(2):
            with serve(address):
                ear.wait(Connected)
                says.send(Outgoing("t", b"to myself"))
                assert ear.wait(Received).payload == b"to myself"
            lost = ear.wait(Disconnected)
            assert 0 < lost.retry_s <= reconnect_delay.MAX_RETRY_DELAY_S
            assert "Unspecified error" not in lost.reason


def test_reason_of_a_failed_attempt_is_repeated_and_that_of_a_lost_connection_is_new(
    serve: Serve, address: BrokerAddress
) -> None:
    with running(address, "a", "t") as (_, ear):
        assert [ear.wait(Disconnected).repeated for _ in range(3)] == [False, True, True]
        with serve(address):
            ear.wait(Connected)
        assert not ear.wait(Disconnected).repeated
        while not ear.wait(Disconnected).repeated:
            pass


def test_reason_of_a_second_lost_connection_is_not_repeated() -> None:
    def accept(peer: socket.socket) -> None:
        peer.settimeout(1)
        with suppress(TimeoutError):
            _suback([1])(peer)

    with listening(accept) as (broker, _), running(broker, "a", "t") as (_, ear):
        for _ in range(2):
            ear.wait(Connected)
            assert not ear.wait(Disconnected).repeated


def test_message_without_connection_is_dropped(serve: Serve, address: BrokerAddress) -> None:
    with running(address, "a", "t") as (says, ear):
        ear.wait(Disconnected)
        says.send(Outgoing("t", b"stale"))
        ear.wait(Disconnected)
        with serve(address):
            ear.wait(Connected)
            says.send(Outgoing("t", b"fresh"))
            assert ear.wait(Received).payload == b"fresh"


def test_session_that_may_not_connect_publishes_nothing(broker: BrokerAddress) -> None:
    """Its connection ends in place of the next publication, and at a stop without the final one."""
    may_connect = threading.Event()
    may_connect.set()
    with (
        running(broker, "b", "t") as (there, hears),
        running(broker, "a", may_connect=may_connect.is_set) as (says, ear),
    ):
        hears.wait(Connected)
        ear.wait(Connected)
        may_connect.clear()
        says.send(Outgoing("t", b"withheld"))
        assert "another program" in ear.wait(Disconnected).reason
        may_connect.set()
        ear.wait(Connected)
        says.send(Outgoing("t", b"sent"))
        assert hears.wait(Received).payload == b"sent"
        ear.wait(Drained)
        may_connect.clear()
        says.stop([Outgoing("t", b"final")])
        there.send(Outgoing("t", b"of another program"))
        assert hears.wait(Received).payload == b"of another program"


def _own_sockets(port: int) -> set[int]:
    """Return the file descriptors of this process that are TCP connections to a port."""
    connections = psutil.Process().net_connections("tcp")
    return {each.fd for each in connections if each.raddr and each.raddr.port == port}


def test_will_message_is_delivered_when_a_socket_dies(broker: BrokerAddress) -> None:
    with running(broker, "b", "state") as (_, hears):
        hears.wait(Connected)
        before = _own_sockets(broker.port)
        with running(broker, "a", will=lambda: Outgoing("state", b"offline", retain=True)) as (says, ear):
            ear.wait(Connected)
            (dying,) = _own_sockets(broker.port) - before
            with socket.socket(fileno=os.dup(dying)) as victim:
                victim.shutdown(socket.SHUT_RDWR)
            assert hears.wait(Received).payload == b"offline"
            ear.wait(Disconnected)
            ear.wait(Connected)
            says.send(Outgoing("state", b"online", retain=True))
            assert hears.wait(Received).payload == b"online"


def test_stop_sends_final_message_instead_of_will(broker: BrokerAddress) -> None:
    with running(broker, "b", "state") as (_, hears):
        hears.wait(Connected)
        with running(broker, "a", will=lambda: Outgoing("state", b"offline"), window=2) as (says, ear):
            ear.wait(Connected)
            for number in range(20):
                says.send(Outgoing("state", str(number).encode()))
            says.stop([Outgoing("state", b"stopped")])
        got = [hears.wait(Received).payload for _ in range(21)]
        assert got == [*(str(number).encode() for number in range(20)), b"stopped"]
        with running(broker, "c") as (marks, ear):
            ear.wait(Connected)
            marks.send(Outgoing("state", b"end"))
            assert hears.wait(Received).payload == b"end"


def test_final_messages_are_delivered_before_disconnect(
    broker: BrokerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnecting_session, "STOP_TIMEOUT_S", float(TIMEOUT_S))
    with running(broker, "b", "state") as (_, hears):
        hears.wait(Connected)
        for number in range(15):
            with running(broker, f"a{number}", "state") as (says, ear):
                ear.wait(Connected)
                says.send(Outgoing("state", b"online", retain=True))
                says.stop([Outgoing("state", str(number).encode(), retain=True)], timeout_s=TIMEOUT_S)
            while (heard := hears.wait(Received).payload) != str(number).encode():
                assert heard == b"online"


def test_too_many_open_files_are_the_reason(broker: BrokerAddress) -> None:
    """A session waits with `select`, which takes no file descriptor from 1,024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2 * FD_SETSIZE, hard)), hard))
    gc.collect()  # garbage of other tests would free low descriptors later
    try:
        with ExitStack() as files:
            for _ in range(FD_SETSIZE):
                files.enter_context(Path(os.devnull).open())
            with running(broker, "a") as (_, ear):
                assert "so many open files" in ear.wait(Disconnected).reason
                files.close()
                ear.wait(Connected)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_stop_without_broker_ends_the_thread(address: BrokerAddress) -> None:
    with running(address, "a") as (made, ear):
        ear.wait(Disconnected)
        made.stop([Outgoing("t", b"bye")])
        assert "mqtt-session" not in {thread.name for thread in threading.enumerate()}


def test_listener_that_closes_is_retried_with_delay() -> None:
    with listening(lambda _: None) as (broker, times), running(broker, "a") as (_, ear):
        pauses = [ear.wait(Disconnected).retry_s for _ in range(4)]
        assert len(times) >= 8
        assert all(
            second - first >= pause
            for pause, first, second in zip(pauses, times[1::2], times[2::2], strict=False)
        )
        assert {type(event) for event in ear.rest()} <= {Disconnected}


def test_failed_attempts_and_lost_connections_leak_no_sockets_or_threads(address: BrokerAddress) -> None:
    with running(address, "a") as (_, ear):
        files, threads = leaked(ear)
    assert files <= 2
    assert threads <= 1
    gc.disable()
    try:
        with listening(lambda _: None) as (broker, _), running(broker, "a") as (_, ear):
            assert leaked(ear)[0] <= 6
    finally:
        gc.enable()


def test_silent_listener_times_out_and_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting_session, "CONNECT_TIMEOUT_S", 0.5)
    release = threading.Event()

    def say_nothing(_: socket.socket) -> None:
        release.wait(TIMEOUT_S)

    with listening(say_nothing) as (broker, _):
        with running(broker, "a") as (_, ear):
            assert "does not answer" in ear.wait(Disconnected).reason
            ear.wait(Disconnected)
        release.set()


def _suback(*answers: list[int]) -> Callable[[socket.socket], None]:
    """A broker of MQTT 5 that accepts the connection and answers each subscription with return codes, then never."""

    def answer(peer: socket.socket) -> None:
        peer.recv(1024)
        peer.sendall(b"\x20\x03\x00\x00\x00")
        for codes in answers:
            packet = peer.recv(1024)
            peer.sendall(bytes([0x90, 3 + len(codes)]) + packet[2:4] + b"\x00" + bytes(codes))
        while peer.recv(1024):
            pass

    return answer


@pytest.mark.parametrize(
    "answers", [[[0x87]], [[0x80]] * SUBSCRIBE_ATTEMPTS], ids=["denied", "failing each time"]
)
def test_subscription_without_success_is_a_failed_connection(answers: list[list[int]]) -> None:
    with listening(_suback(*answers)) as (broker, _), running(broker, "a", "secret") as (_, ear):
        assert "denies subscribing to secret" in ear.wait(Disconnected).reason
        ear.wait(Disconnected)
        assert Connected not in map(type, ear.rest())


def test_only_subscriptions_that_failed_are_repeated() -> None:
    """The answers have as many codes as filters were asked for; the last filter fails twice."""
    with (
        listening(_suback([0x80, 1, 0x80], [1, 0x80], [1])) as (broker, times),
        running(broker, "a", "b", "c", "d") as (_, ear),
    ):
        ear.wait(Connected)
        assert Disconnected not in map(type, ear.seen)
        assert len(times) == 1


def test_unanswered_subscription_moves_on_to_the_next_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SUBSCRIBE_TIMEOUT_S", 0.5)
    with (
        listening(_suback()) as (silent, _),
        listening(_suback([1])) as (other, _),
        running((silent, other), "a", "b") as (_, ear),
    ):
        assert "does not answer the subscription" in ear.wait(Disconnected).reason
        assert ear.wait(Connected).broker == str(other)


def test_end_of_the_sessions_thread_is_reported(
    broker: BrokerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that got no event would live on without a session."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name.startswith("paho"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with running(broker, "a") as (_, ear):
        assert "mqtt-session has ended unexpectedly: cannot start a thread" in str(ear.wait(ThreadFailed))


@needs_mosquitto
def test_next_broker_is_used_when_one_ends(address: BrokerAddress, tmp_path: Path) -> None:
    """A broker that does not run is skipped; all clients of the first one pause at its end, then use the next one."""
    nothing, second = free_address(), free_address()
    with (
        mosquitto(address, tmp_path) as first,
        mosquitto(second, tmp_path),
        running((nothing, address, second), "a", "t") as (session, log),
    ):
        assert log.wait(Connected).broker == str(address)
        (skipped,) = log.seen[:-1]
        assert isinstance(skipped, Disconnected)
        assert (skipped.broker, skipped.retry_s) == (str(nothing), 0)
        first.kill()
        ended = log.wait(Disconnected)
        assert ended.broker == str(address)
        assert ended.retry_s > 0
        assert log.wait(Connected).broker == str(second)
        session.send(Outgoing("t", b"over the second"))
        assert log.wait(Received).payload == b"over the second"


def test_broker_that_closes_after_it_was_accepted_is_not_taken_for_one_with_tls() -> None:
    """The first address accepts one connection, and the second one closes each of them unanswered."""
    accepts = iter([_suback([1])])

    def accept_once(peer: socket.socket) -> None:
        for accept in accepts:
            peer.settimeout(1)
            with suppress(TimeoutError):
                accept(peer)

    with (
        listening(accept_once) as (first, _),
        listening(lambda _: None) as (second, _),
        running((first, second), "a", "b") as (_, log),
    ):
        log.wait(Connected)
        log.wait(Disconnected)
        assert log.wait(Disconnected).reason.endswith("it may be starting, or its cluster has no majority")
