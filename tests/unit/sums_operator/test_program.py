"""The program on a real broker, with a client in the place of the aggregator."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest
from msgspec.structs import replace

from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Outgoing, Received
from protocol.wire.codec import decode, digest_of, encode, to_array
from protocol.wire.messages import MAX_BLOB_BYTES, MAX_FRAME_BYTES, Frame, SumReply, SumRequest
from protocol.wire.signing import is_own_sum, public_key
from protocol.wire.topics import fleet_topic
from protocol.wire.transfer import frames_of
from sums_operator.state import make_operator, read_keys
from tests.support.messages.sums import FLEET, NAMES, signing_key, sum_of, sum_request
from tests.support.network.brokers import mosquitto, needs_mosquitto
from tests.support.network.sessions import running

pytestmark = [needs_mosquitto, pytest.mark.timeout(600)]

VALUES = 40_000
"""A reply of three frames."""


class World:
    """A second operator's process, and a client that requests sums."""

    def __init__(self, folder: Path, broker: BrokerAddress) -> None:
        self.state = folder / "state"
        make_operator(self.state)
        self.public = {name: bytes.fromhex(key) for name, key in read_keys(self.state).public().items()}
        known = "".join(f"{name} {public_key(signing_key(name)).hex()}\n" for name in NAMES)
        (folder / "devices").write_text(known, encoding="utf-8")
        self._command = [
            *(sys.executable, "-m", "sums_operator", "run", "--state", str(self.state)),
            *("--broker", str(broker), "--fleet", FLEET, "--devices", str(folder / "devices")),
        ]
        self.log_file = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self._topics = fleet_topic(FLEET, "sums/request"), fleet_topic(FLEET, "sums/reply")
        self._running = running(broker, "aggregator", self._topics[1])

    def __enter__(self) -> Self:
        self._session, self._events = self._running.__enter__()
        self._events.wait(Connected)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._running.__exit__(None, None, None)

    def start(self) -> None:
        """Start the program, and wait until it has subscribed."""
        self.starts += 1
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(self._command, stderr=log)
        while self.log().count(" connected ") < self.starts:
            assert self.process.poll() is None, self.log()
            time.sleep(0.05)

    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def request(self, devices: list[str], **options: int) -> SumRequest:
        return sum_request(devices, seal_key=self.public["seal_key"], values=VALUES, **options)

    def publish(self, *payloads: bytes) -> None:
        for payload in payloads:
            self._session.send(Outgoing(self._topics[0], payload))

    def ask(self, request: SumRequest) -> bytes:
        """Publish a request; returns the encoded reply."""
        payload, held = encode(request), b""
        self.publish(*map(encode, frames_of(payload, digest=digest_of(payload), chunk_bytes=700)))
        while True:
            frame = decode(self._events.wait(Received).payload, Frame, max_bytes=MAX_FRAME_BYTES)
            held = held[: frame.offset] + frame.data
            if len(held) == frame.size_bytes:
                assert digest_of(held) == frame.digest
                assert decode(held, SumReply, max_bytes=MAX_BLOB_BYTES).request == digest_of(payload)
                return held

    def refusal(self, request: SumRequest) -> str:
        reply = decode(self.ask(request), SumReply, max_bytes=MAX_BLOB_BYTES)
        assert not reply.masks
        return reply.problem


@pytest.fixture
def world(tmp_path: Path, address: BrokerAddress) -> Iterator[World]:
    with mosquitto(address, tmp_path), World(tmp_path, address) as made:
        yield made


def test_fleet_of_three_is_summed_once(world: World) -> None:
    """The sum is exact and stays the same; what overlaps it, is too small, unknown or forged is refused."""
    request = world.request(NAMES[:3])
    first = world.ask(request)
    reply = decode(first, SumReply, max_bytes=MAX_BLOB_BYTES)
    assert is_own_sum(reply, public=world.public["sign_key"], fleet=FLEET)
    assert reply.masks
    np.testing.assert_array_equal(to_array(reply.masks), sum_of(NAMES[:3], VALUES))

    payload = encode(request)
    contradicting = Frame(
        v=1, digest=digest_of(payload), size_bytes=len(payload), offset=0, data=b"other bytes"
    )
    world.publish(
        b"", b"garbage", encode(reply), encode(contradicting), encode(replace(contradicting, offset=9))
    )
    assert world.ask(request) == first
    world.kill()
    world.start()
    assert world.ask(request) == first

    forged = world.request(NAMES[3:6])
    submissions = (*forged.submissions[:2], replace(forged.submissions[2], sequence=9))
    refused = [
        world.refusal(world.request(NAMES[2:])),
        world.refusal(world.request(NAMES[3:5])),
        world.refusal(world.request([*NAMES[3:], "stranger"])),
        world.refusal(replace(forged, submissions=submissions)),
    ]
    assert refused == [
        "shed-3 is in another list of this task, whose sum was opened",
        "expected at least 3 submissions, as the second operator requires, got 2",
        "stranger is not in the second operator's list of devices",
        "the signature of the mask of shed-6 is invalid",
    ]
    others = decode(world.ask(forged), SumReply, max_bytes=MAX_BLOB_BYTES)
    assert others.masks
    np.testing.assert_array_equal(to_array(others.masks), sum_of(NAMES[3:6], VALUES))
    assert world.log().count("masks summed task=") == 4
    assert world.log().count("request refused request=") == 4
    assert "Traceback" not in world.log()
    assert world.process is not None
    world.process.terminate()
    assert world.process.wait(timeout=60) == 0
