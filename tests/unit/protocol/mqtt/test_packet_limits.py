"""The size of a packet, and the packet limit inferred from disconnects."""

import socket

import paho.mqtt.client as paho
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from protocol.mqtt.publisher import MIN_LIMIT_BYTES, InferredLimit, packet_bytes

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


def test_disconnect_without_large_packet_resets_the_count() -> None:
    limit = InferredLimit()
    for in_flight in ([60000], [], [60000], []):
        limit = limit.disconnected(in_flight)
    assert limit.limit_bytes is None


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
