"""One MQTT connection: its end, its publisher and packet limits, presences, delays, and the probe of `doctor`."""

import random
import socket
import threading
import time
from pathlib import Path
from typing import cast

import paho.mqtt.client as paho
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from protocol.doctor.broker import BrokerProbe
from protocol.mqtt import diagnostics, reconnecting_session
from protocol.mqtt.client import Connection, Version, stop_thread
from protocol.mqtt.events import Event, Outgoing
from protocol.mqtt.own_presence import OwnPresence
from protocol.mqtt.publisher import MIN_LIMIT_BYTES, InferredLimit, Publisher, packet_bytes
from protocol.mqtt.reconnect_delay import MAX_RETRY_DELAY_S, Backoff, retry_delay_s
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAddress
from protocol.wire.codec import decode
from protocol.wire.messages import Presence, PresenceState
from protocol.wire.presence import Reaction
from protocol.wire.topics import device_topic
from tests.support.network.brokers import mosquitto, needs_mosquitto
from tests.support.network.sessions import listening


@needs_mosquitto
def test_thread_that_ends_while_it_is_stopped(
    address: BrokerAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paho looks for the thread, and then for the current one; by then, the first has ended."""
    with mosquitto(address, tmp_path):
        client = paho.Client(CallbackAPIVersion.VERSION2)
        client.connect(address.host, address.port)
        client.loop_start()
        (thread,) = (each for each in threading.enumerate() if each.name.startswith("paho-mqtt-client"))
        current = threading.current_thread

        def after_the_end() -> threading.Thread:
            if threading.get_ident() != thread.ident:
                monkeypatch.undo()
                client.disconnect()
                thread.join()
            return current()

        monkeypatch.setattr(threading, "current_thread", after_the_end)
        stop_thread(client)
        assert not thread.is_alive()


def test_unspecified_error_is_put_into_words() -> None:
    """MQTT's name of it gives no cause; other reasons stay as they are."""
    code = "Unspecified error"
    assert diagnostics.explained(code, unspecified="the network closed it") == "the network closed it"
    assert diagnostics.explained("Keep alive timeout", unspecified="") == "Keep alive timeout"
    assert diagnostics.refused(code, NO_AUTHENTICATION).endswith("without a reason: see its log")
    assert diagnostics.explained(code) == "the broker gives no reason: see its log"
    assert diagnostics.explained("Quota exceeded") == "Quota exceeded"


class _Connection:
    window = 8
    max_packet_bytes = None

    def __init__(self, broker: str = "broker") -> None:
        self.broker = BrokerAddress(broker)
        self.published: list[bytes] = []

    def publish(self, outgoing: Outgoing) -> int:
        self.published.append(outgoing.payload)
        return len(self.published)


def test_newer_publication_replaces_a_denied_one() -> None:
    events: list[Event] = []
    connection = _Connection()
    publisher = Publisher(events.append)
    publisher.begin(cast("Connection", connection))
    publisher.add([Outgoing("a", b"old", retain=True), Outgoing("b", b"other", retain=True)])
    publisher.acknowledge(1, "not authorized")
    publisher.acknowledge(2, "not authorized")
    publisher.add([Outgoing("a", b"new", retain=True)])
    publisher.acknowledge(3, "")
    publisher.retry_denied()
    assert connection.published == [b"old", b"other", b"new", b"other"]


def test_limits_of_several_brokers_are_inferred_although_connections_alternate() -> None:
    publisher = Publisher(lambda _: None)

    def limit_of(broker: str, payload_bytes: int) -> int | None:
        limit = publisher.begin(cast("Connection", _Connection(broker)))
        publisher.add([Outgoing("t", bytes(payload_bytes))])
        publisher.end()
        return limit

    limits = [limit_of(broker, size) for _ in range(3) for broker, size in (("a", 30000), ("b", 60000))]
    assert limits == [None, None, None, None, packet_bytes("t", 30000) // 2, packet_bytes("t", 60000) // 2]


SIZES = st.integers(1, 10**6)


@pytest.mark.parametrize("payload_bytes", [0, 1, 110, 120, 16370, 16380, 61440])
def test_packet_bytes_equals_size_on_the_wire(payload_bytes: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
        client._sock = ours
        client.publish("pf/ü", bytes(payload_bytes), qos=1)
        client._sock = None
        ours.shutdown(socket.SHUT_WR)
        with theirs.makefile("rb") as wire:
            assert len(wire.read()) == packet_bytes("pf/ü", payload_bytes)


def test_two_disconnects_during_large_packets_infer_a_limit() -> None:
    limit = InferredLimit()
    limits = []
    for size in (60000, 60000, 30000, 30000, 5000, 5000, 4096, 4096):
        limit = limit.disconnected([100, size, 200])
        limits.append(limit.limit_bytes)
    assert limits == [None, 30000, 30000, 15000, 15000, MIN_LIMIT_BYTES] + 2 * [MIN_LIMIT_BYTES]


@given(st.lists(st.one_of(SIZES, st.lists(SIZES, max_size=3)), max_size=30))
def test_acknowledged_sizes_stay_allowed(happenings: list[int | list[int]]) -> None:
    limit = InferredLimit()
    for happening in happenings:
        before = limit.limit_bytes
        if isinstance(happening, int):
            limit = limit.acknowledged(happening)
            assert limit.limit_bytes == before
            continue
        limit = limit.disconnected(happening)
        if limit.limit_bytes != before:
            assert limit.limit_bytes is not None
            assert max(limit.acknowledged_bytes, MIN_LIMIT_BYTES) <= limit.limit_bytes < max(happening)


NOW = int(time.time())


def presence_of(key: bytes, *, epoch: int, state: PresenceState = "online") -> Presence:
    outgoing = OwnPresence(epoch=epoch, topic="state", key=key).outgoing(state)
    return decode(outgoing.payload, Presence, max_bytes=1024)


@pytest.mark.parametrize(
    ("epoch", "state", "may_end", "reaction"),
    [
        (NOW + 1, "online", True, Reaction.END),
        (NOW + 1, "online", False, Reaction.PUBLISH),
        (2**61, "online", True, Reaction.PUBLISH),
        (NOW - 1, "offline", True, Reaction.PUBLISH),
        (NOW - 1, "online", True, Reaction.NONE),
        (NOW - 1, "online", False, Reaction.NONE),
    ],
    ids=["newer", "newer, staying", "in the future", "old will", "older", "older, staying"],
)
def test_another_key_ends_only_a_program_that_may_end(
    epoch: int, state: PresenceState, *, may_end: bool, reaction: Reaction
) -> None:
    own = OwnPresence(epoch=NOW, topic="state", key=b"a" * 32)
    seen = presence_of(b"b" * 32, epoch=epoch, state=state)
    assert own.react(seen, may_end=may_end) is reaction
    assert (own.epoch, own.final_state) == (NOW, "stopped")


def test_same_key_counts_in_every_fleet() -> None:
    """A later start of this key keeps this program out, once its own presence was delivered."""
    own = OwnPresence(epoch=NOW, topic="state", key=b"a" * 32)
    echo = decode(own.outgoing("online").payload, Presence, max_bytes=1024)
    assert own.react(echo, may_end=False) is Reaction.NONE
    later = presence_of(b"a" * 32, epoch=NOW + 1)
    assert own.react(later, may_end=True) is Reaction.STAY_OUT
    assert own.final_state == "replaced"


@given(failures=st.integers(0, 10**9), seed=st.integers())
def test_delays_are_bounded_and_jittered(failures: int, seed: int) -> None:
    rng = random.Random(seed)
    delays = {retry_delay_s(failures, rng.uniform) for _ in range(5)}
    assert all(0.2 <= delay <= MAX_RETRY_DELAY_S for delay in delays)
    assert len(delays) > 1


def test_maximum_delay_doubles_up_to_a_minute() -> None:
    longest = [retry_delay_s(failures, lambda _, high: high) for failures in range(1, 9)]
    assert longest == [2, 4, 8, 16, 32, 60, 60, 60]


def _longest(_: float, high: float) -> float:
    return high


def test_only_a_useful_connection_resets_the_count() -> None:
    backoff = Backoff(1, _longest)
    assert backoff.pause_s(connected_s=0.1, messages=0) == 2
    assert backoff.pause_s(connected_s=0, messages=0) == 4
    assert backoff.pause_s(connected_s=3.9, messages=8) == 8
    assert backoff.pause_s(connected_s=8.1, messages=0) == 2
    assert backoff.pause_s(connected_s=0, messages=0) == 4
    assert backoff.pause_s(connected_s=0.1, messages=50) == 2


def test_next_address_is_tried_at_once_unless_a_connection_has_ended() -> None:
    """A pause follows a whole round of addresses that cannot be reached, and the end of each connection."""
    backoff = Backoff(3, _longest)
    pauses = [backoff.pause_s(connected_s=0, messages=0) for _ in range(9)]
    assert pauses == [0, 0, 2, 0, 0, 4, 0, 0, 8]
    pauses = [backoff.pause_s(connected_s=seconds, messages=0) for seconds in (100, 0, 0, 0)]
    assert pauses == [2, 0, 0, 4]


@given(connected_s=st.floats(0.001, 59), messages=st.integers(0, 10**6), addresses=st.integers(1, 5))
def test_brokers_that_end_each_connection_are_not_tried_without_a_pause(
    *, connected_s: float, messages: int, addresses: int
) -> None:
    backoff = Backoff(addresses, _longest)
    assert all(backoff.pause_s(connected_s=connected_s, messages=messages) for _ in range(3 * addresses))


@pytest.mark.parametrize(("connections", "status"), [(0, "ok"), (1, "ok"), (100, "failed")])
def test_one_lost_connection_is_no_failure(connections: int, status: str) -> None:
    """A broker that ends each of them as it answers is one."""
    ends = iter([True] * connections)

    def answer(peer: socket.socket) -> None:
        peer.recv(1024)
        peer.sendall(b"\x20\x03\x00\x00\x00")
        subscribe = peer.recv(1024)
        if next(ends, False):
            return
        peer.sendall(b"\x90\x04" + subscribe[2:4] + b"\x00\x01")
        while peer.recv(1024):
            pass

    with (
        listening(answer) as (address, _),
        BrokerProbe(address, NO_AUTHENTICATION, subscriptions=("a",)) as probe,
    ):
        assert probe.open().status == status


@needs_mosquitto
@pytest.mark.parametrize(
    ("version", "limit", "status", "text"),
    [
        (Version.MQTTv5, "", "ok", "a packet of 61,824 bytes passes"),
        (
            Version.MQTTv5,
            "message_size_limit 61439",
            "warning",
            "ends the connection at a packet of 61,824 bytes",
        ),
        (Version.MQTTv311, "message_size_limit 61439", "warning", "61,824 bytes, and does not deliver it"),
    ],
)
def test_packet_limit_that_is_not_announced_is_found(
    version: Version, limit: str, status: str, text: str, *, address: BrokerAddress, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(reconnecting_session, "VERSIONS", (version,))
    topic = device_topic("f", "a", "state")
    with (
        mosquitto(address, tmp_path, options=f"allow_anonymous true\n{limit}"),
        BrokerProbe(address, NO_AUTHENTICATION, subscriptions=(topic,)) as probe,
    ):
        assert probe.open().status == "ok"
        found = probe.check_packets(topic, comes_back=True)
    assert (found.status, text in found.text) == (status, True), found
