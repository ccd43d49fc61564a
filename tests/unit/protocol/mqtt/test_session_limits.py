"""MQTT versions, packet limits, denied publications and acknowledgements of a session."""

import contextlib
import getpass
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from paho.mqtt.enums import MQTTProtocolVersion

from protocol.mqtt import client, reconnect_delay, reconnecting_session
from protocol.mqtt.publisher import packet_bytes
from protocol.mqtt.reconnecting_session import (
    BrokerAddress,
    Connected,
    Disconnected,
    Drained,
    Outgoing,
    Received,
    Unsendable,
)
from tests.support.network.brokers import amqtt, free_address, mosquitto, needs_mosquitto
from tests.support.network.sessions import TIMEOUT_S, EventLog, listening, other_client, running

pytestmark = pytest.mark.usefixtures("short_pauses")

V5, V311 = MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311


@needs_mosquitto
def test_messages_are_read_at_any_qos(address: BrokerAddress, tmp_path: Path) -> None:
    with mosquitto(address, tmp_path), running(address, "ear", "said") as (_, ear):
        ear.wait(Connected)
        with other_client(address) as publish:
            for qos in (0, 1, 2):
                publish("said", str(qos).encode(), qos=qos)
            assert [ear.wait(Received).payload for _ in range(3)] == [b"0", b"1", b"2"]


@needs_mosquitto
def test_retained_message_crosses_a_bridge_with_mosquittos_default_qos(
    address: BrokerAddress, tmp_path: Path
) -> None:
    """The bridge forwards at QoS 0, which the receiver can see."""
    near = free_address()
    bridge = f"allow_anonymous true\nconnection far\naddress {address}\nrestart_timeout 1\ntopic # both"
    with (
        mosquitto(address, tmp_path),
        mosquitto(near, tmp_path, options=bridge),
        running(address, "a") as (says, ear),
        running(near, "b", "task") as (_, hears),
    ):
        ear.wait(Connected)
        says.send(Outgoing("task", b"signed", retain=True))
        received = hears.wait(Received)
        assert (received.payload, received.is_at_qos_0) == (b"signed", True)


@needs_mosquitto
def test_unhandled_messages_at_qos_0_are_bounded(
    address: BrokerAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No acknowledgement slows down their sender: those beyond the bound are dropped, and none at QoS 1."""
    monkeypatch.setattr(client, "MAX_AT_QOS_0", 3)
    with mosquitto(address, tmp_path), running(address, "ear", "said", manual_ack=True) as (made, ear):
        ear.wait(Connected)
        with other_client(address) as publish:
            for letter in (b"a", b"b", b"c", b"d", b"e"):
                publish("said", letter, qos=0)
            publish("said", b"all", qos=1)
            waiting = [ear.wait(Received) for _ in range(4)]
            assert [message.payload for message in waiting] == [b"a", b"b", b"c", b"all"]
            for message in waiting:
                made.acknowledge(message)
            publish("said", b"again", qos=0)
            assert ear.wait(Received).payload == b"again"


@pytest.fixture
def only_311(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting_session, "VERSIONS", (V311,))


def _speaking(known: int, heard: list[int], *, refusal: bytes) -> Callable[[socket.socket], None]:
    """Return a broker that knows one version of MQTT, and closes each connection after its answer."""

    def answer(peer: socket.socket) -> None:
        level = peer.recv(1024)[8]
        heard.append(level)
        peer.sendall(
            refusal if level != known else b"\x20\x03\x00\x00\x00" if level == 5 else b"\x20\x02\x00\x00"
        )

    return answer


@pytest.mark.parametrize(
    "refusal", [b"\x20\x02\x00\x01", b"\x20\x03\x00\x84\x00", b""], ids=["3", "5", "close"]
)
@pytest.mark.parametrize(("known", "expected"), [(4, [5, 4, 4, 4]), (5, [5, 5, 5])])
def test_accepted_mqtt_version_is_found_and_reused(known: int, expected: list[int], refusal: bytes) -> None:
    heard: list[int] = []
    with listening(_speaking(known, heard, refusal=refusal)) as (broker, _), running(broker, "a") as (_, ear):
        for _ in range(3):
            ear.wait(Connected)
        assert heard[: len(expected)] == expected


def test_replaced_broker_is_tried_in_both_versions() -> None:
    heard: list[int] = []

    def answer(peer: socket.socket) -> None:
        _speaking(4 if len(heard) < 2 else 5, heard, refusal=b"")(peer)

    with listening(answer) as (broker, _), running(broker, "a") as (_, ear):
        ear.wait(Connected)
        ear.wait(Connected)
    assert heard[:4] == [5, 4, 4, 5]


def test_amqtt_connects_without_timeout(address: BrokerAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting_session, "CONNECT_TIMEOUT_S", 3600.0)
    will = Outgoing("state", b"offline", retain=True)
    with amqtt(address), running(address, "a" * 23, "t", will=lambda: will) as (made, ear):
        says = Outgoing("t", b"sent while connecting")
        made.send(says)
        assert ear.wait(Received) == Received("t", says.payload)
        assert Disconnected not in map(type, ear.seen)


SMALL = "allow_anonymous true\nmax_packet_size 20000"


@needs_mosquitto
def test_oversized_publication_is_unsendable_and_others_are_sent(
    address: BrokerAddress, tmp_path: Path
) -> None:
    with (
        mosquitto(address, tmp_path, options=SMALL),
        running(address, "b", "t") as (_, hears),
        running(address, "a") as (says, ear),
    ):
        hears.wait(Connected)
        assert ear.wait(Connected) == Connected(20000)
        for size in (10, 19991, 30000, 19990, 11):
            says.send(Outgoing("t", bytes(size)))
        refused = [ear.wait(Unsendable) for _ in range(2)]
        assert [event.repeated for event in refused] == [False, True]
        assert "it has 20001 bytes, the broker accepts 20000" in refused[0].reason
        assert refused[0].topic == "t"
        ear.wait(Drained)
        got = [hears.wait(Received).payload for _ in range(3)]
        assert [len(payload) for payload in got] == [10, 19990, 11]
        assert Disconnected not in map(type, ear.rest())


UNANNOUNCED = "allow_anonymous true\nmessage_size_limit 20000"


@needs_mosquitto
@pytest.mark.parametrize(("version", "options"), [(V311, SMALL), (V5, UNANNOUNCED)], ids=["3.1.1", "5"])
def test_packet_limit_that_is_not_announced_is_inferred(
    version: MQTTProtocolVersion, options: str, address: BrokerAddress, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In MQTT 5, mosquitto answers with a reason code that paho does not know, and paho ends the connection."""
    monkeypatch.setattr(reconnecting_session, "VERSIONS", (version,))
    with mosquitto(address, tmp_path, options=options), running(address, "a", "t") as (says, ear):
        for _ in range(2):
            assert ear.wait(Connected) == Connected(None)
            says.send(Outgoing("t", bytes(30000)))
            ear.wait(Disconnected)
        limit = ear.wait(Connected).max_packet_bytes
        assert limit == 30010 // 2
        says.send(Outgoing("t", bytes(30000)))
        assert f"the broker accepts {limit}" in ear.wait(Unsendable).reason
        says.send(Outgoing("t", bytes(limit - 100)))
        assert len(ear.wait(Received).payload) == limit - 100
    assert (
        len([record for record in caplog.records if f"packet limit set bytes={limit}" in record.getMessage()])
        == 1
    )


def test_receive_maximum_bounds_the_window() -> None:
    sent = bytearray()
    silent = threading.Event()

    def answer(peer: socket.socket) -> None:
        peer.recv(1024)
        peer.sendall(b"\x20\x06\x00\x00\x03\x21\x00\x02")
        while len(sent) < 2 * packet_bytes("t", 1) and (data := peer.recv(1024)):
            sent.extend(data)
        peer.settimeout(1)
        with contextlib.suppress(TimeoutError):
            sent.extend(peer.recv(1024))
        silent.set()

    with listening(answer) as (broker, _), running(broker, "a") as (says, ear):
        ear.wait(Connected)
        for _ in range(8):
            says.send(Outgoing("t", b"x"))
        assert silent.wait(TIMEOUT_S)
    assert len(sent) == 2 * packet_bytes("t", 1)


@needs_mosquitto
def test_denied_retained_publication_is_retried(address: BrokerAddress, tmp_path: Path) -> None:
    """Clients may publish to `ours/...` only: others are unsendable, with the reason, and are sent once they may be."""
    rules, pid_file = tmp_path / "acl", tmp_path / "mosquitto.pid"
    rules.write_text("topic read #\ntopic write ours/#\n", encoding="utf-8")
    options = f"allow_anonymous true\nuser {getpass.getuser()}\nacl_file {rules}\npid_file {pid_file}"
    with (
        mosquitto(address, tmp_path, options=options),
        running(address, "b", "theirs/+") as (_, hears),
        running(address, "a") as (says, ear),
    ):
        hears.wait(Connected)
        says.send(Outgoing("theirs/passing", b"x"))
        says.send(Outgoing("theirs/kept", b"old", retain=True))
        says.send(Outgoing("theirs/kept", b"new", retain=True))
        denied = [ear.wait(Unsendable) for _ in range(6)]
        assert [event.topic for event in denied] == ["theirs/passing", *["theirs/kept"] * 5]
        assert [event.repeated for event in denied][:4] == [False, False, True, True]
        assert "Not authorized" in denied[0].reason
        assert "access list" in denied[0].reason
        rules.write_text("topic readwrite #\n", encoding="utf-8")
        os.kill(int(pid_file.read_text()), signal.SIGHUP)
        assert hears.wait(Received).payload == b"new"
        says.send(Outgoing("theirs/end", b"x"))
        assert hears.wait(Received).topic == "theirs/end"
        assert Disconnected not in map(type, ear.rest())


def test_delay_grows_if_every_publication_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def retry_delay_s(failures: int, _: Callable[[float, float], float]) -> float:
        counts.append(failures)
        return 3600.0

    monkeypatch.setattr(reconnect_delay, "retry_delay_s", retry_delay_s)
    monkeypatch.setattr(reconnecting_session.Session, "_stopped_within", lambda *_: False)

    def answer(peer: socket.socket) -> None:
        peer.recv(1024)
        peer.sendall(b"\x20\x03\x00\x00\x00")
        peer.recv(1024)

    with listening(answer) as (broker, _), running(broker, "a") as (says, ear):
        for _ in range(3):
            ear.wait(Connected)
            says.send(Outgoing("denied", b"x"))
            ear.wait(Disconnected)
    assert counts[:3] == [1, 2, 3]


def _numbers(ear: EventLog, count: int) -> list[Received]:
    return [ear.wait(Received) for _ in range(count)]


@needs_mosquitto
@pytest.mark.parametrize("version", [V5, V311])
def test_unacknowledged_messages_bound_delivery(
    version: MQTTProtocolVersion, address: BrokerAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnecting_session, "VERSIONS", (version,))
    options = "allow_anonymous true\nmax_inflight_messages 5"
    with (
        mosquitto(address, tmp_path, options=options),
        running(address, "slow", "t", manual_ack=True) as (slow, slow_ear),
        running(address, "quick", "t") as (quick, quick_ear),
    ):
        slow_ear.wait(Connected)
        quick_ear.wait(Connected)
        for number in range(40):
            quick.send(Outgoing("t", bytes([number])))
        assert len(_numbers(quick_ear, 40)) == 40
        held = _numbers(slow_ear, 5)
        assert slow_ear.rest() == []
        got = []
        while held:
            got.append(held.pop(0))
            threading.Thread(target=slow.acknowledge, args=(got[-1],)).start()
            if len(got) + len(held) < 40:
                held.append(slow_ear.wait(Received))
        assert [event.payload for event in got] == [bytes([number]) for number in range(40)]


@pytest.mark.usefixtures("only_311")
def test_message_ahead_of_suback_is_acknowledged() -> None:
    answers: list[bytes] = []

    def answer(peer: socket.socket) -> None:
        peer.recv(1024)
        peer.sendall(b"\x20\x02\x00\x00")
        subscribe = peer.recv(1024)
        peer.sendall(b"\x32\x06\x00\x01t\x00\x07x")
        peer.settimeout(TIMEOUT_S)
        with contextlib.suppress(TimeoutError):
            answers.append(peer.recv(1024))
        peer.sendall(b"\x90\x03" + subscribe[2:4] + b"\x01")
        peer.recv(1024)

    with listening(answer) as (broker, _), running(broker, "a", "t", manual_ack=True) as (made, ear):
        made.acknowledge(ear.wait(Received))
        ear.wait(Connected)
    assert answers == [b"\x40\x02\x00\x07"]


def test_late_acknowledgements_lose_nothing(broker: BrokerAddress) -> None:
    with running(broker, "a", "t", manual_ack=True) as (made, ear):
        ear.wait(Connected)
        for number in range(15):
            made.send(Outgoing("t", bytes([number])))
        got = _numbers(ear, 15)
        for event in reversed(got):
            made.acknowledge(event)
        made.send(Outgoing("t", b"end"))
        got.append(ear.wait(Received))
        assert [event.payload for event in got] == [*(bytes([number]) for number in range(15)), b"end"]


@needs_mosquitto
def test_acknowledgement_of_an_old_connection_is_ignored(address: BrokerAddress, tmp_path: Path) -> None:
    options = "allow_anonymous true\nmax_inflight_messages 1"
    with running(address, "a", "t", manual_ack=True) as (made, ear):
        with mosquitto(address, tmp_path, options=options):
            ear.wait(Connected)
            made.send(Outgoing("t", b"old"))
            old = ear.wait(Received)
        ear.wait(Disconnected)
        made.acknowledge(old)
        with mosquitto(address, tmp_path, options=options), running(address, "b", "t") as (other, other_ear):
            ear.wait(Connected)
            other_ear.wait(Connected)
            for payload in (b"1", b"2"):
                other.send(Outgoing("t", payload))
            first = ear.wait(Received)
            assert (first.payload, first.mid) == (b"1", old.mid)
            made.acknowledge(old)
            _numbers(other_ear, 2)
            made.send(Outgoing("u", b"round trip"))
            ear.wait(Drained)
            assert ear.rest() == []
            made.acknowledge(first)
            assert ear.wait(Received).payload == b"2"


CONNACK, SUBACK = b"\x20\x03\x00\x00\x00", b"\x90\x04\x00\x01\x00\x01"


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x20\x03\x00\x77\x00",
        CONNACK + b"\x90\x04\x00\x01\x00\x77",
        CONNACK + SUBACK + b"\x30\x06\x00\x02a\xff\x00x",
        CONNACK + SUBACK + b"\x30\x04\x00\x09ab",
        CONNACK + SUBACK + b"\x30\x07\x00\x01a\x02\x7fxy",
    ],
    ids=["HTTP", "answer", "subscription", "topic", "length", "property"],
)
def test_invalid_mqtt_disconnects_and_is_retried(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP reads as the beginning of a longer packet, and ends with the time to connect."""
    monkeypatch.setattr(reconnecting_session, "CONNECT_TIMEOUT_S", 2.0)

    def answer(peer: socket.socket) -> None:
        peer.recv(4096)
        peer.sendall(said)
        while peer.recv(4096):
            pass

    with listening(answer) as (broker, times), running(broker, "a", "a") as (_, ear):
        for _ in range(3):
            assert ear.wait(Disconnected).reason
    assert len(times) >= 3
