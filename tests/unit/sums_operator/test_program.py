"""The program on a real broker, with a client in the place of the aggregator."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Outgoing, Received, Session
from protocol.wire.arrays import to_array
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import MAX_BLOB_BYTES, MAX_FRAME_BYTES, Frame, SumReply, SumRequest
from protocol.wire.signing import is_own_sum, public_key
from protocol.wire.topics import fleet_topic
from protocol.wire.transfer import frames_of
from sums_operator.state import make_operator, make_task, read_keys
from tests.support.messages.sums import FLEET, NAMES, signing_key, sum_of, sum_request
from tests.support.network.brokers import mosquitto, needs_mosquitto
from tests.support.network.sessions import EventLog, running

VALUES = 40_000
"""A reply of three frames."""
OVERLAP = "is in another list of this task, whose sum was opened: after a restore, start a new task"
REQUESTS, REPLIES = fleet_topic(FLEET, "sums/request"), fleet_topic(FLEET, "sums/reply")


class World:
    """A second operator's process, and a client that requests sums."""

    def __init__(self, folder: Path, broker: BrokerAddress, session: Session, events: EventLog) -> None:
        self._session, self._events, self._log_file, state = session, events, folder / "log", folder / "state"
        make_operator(state)
        self.public = {name: bytes.fromhex(key) for name, key in read_keys(state).public().items()}
        self.public["seal_key"] = bytes.fromhex(make_task(state, folder / "task.toml"))
        known = "".join(f"{name} {public_key(signing_key(name)).hex()}\n" for name in NAMES)
        (folder / "devices").write_text(known, encoding="utf-8")
        self._command = [
            *(sys.executable, "-m", "sums_operator", "run", "--state", str(state), "--broker", str(broker)),
            *("--fleet", FLEET, "--devices", str(folder / "devices")),
        ]
        self._starts = 0

    def start(self) -> None:
        """Start the program, and wait until it has subscribed."""
        self._starts += 1
        with self._log_file.open("ab") as log:
            self.process = subprocess.Popen(self._command, stderr=log)
        while self.log().count(" connected ") < self._starts:
            assert self.process.poll() is None, self.log()
            time.sleep(0.05)

    def log(self) -> str:
        return self._log_file.read_text(encoding="utf-8")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def request(self, devices: list[str]) -> SumRequest:
        return sum_request(devices, seal_key=self.public["seal_key"], values=VALUES)

    def publish(self, *payloads: bytes) -> None:
        for payload in payloads:
            self._session.send(Outgoing(REQUESTS, payload))

    def ask(self, request: SumRequest) -> bytes:
        """Publish a request; returns the encoded reply."""
        payload, held = encode(request), b""
        self.publish(*map(encode, frames_of(payload, digest=digest_of(payload), chunk_bytes=700)))
        while True:
            frame = decode(self._events.wait(Received).payload, Frame, max_bytes=MAX_FRAME_BYTES)
            held = held[: frame.offset] + frame.data
            if len(held) == frame.size_bytes:
                assert digest_of(held) == frame.digest
                return held

    def reply(self, request: SumRequest) -> SumReply:
        reply = decode(self.ask(request), SumReply, max_bytes=MAX_BLOB_BYTES)
        assert reply.request == digest_of(encode(request))
        return reply


@pytest.fixture
def world(tmp_path: Path, address: BrokerAddress) -> Iterator[World]:
    with mosquitto(address, tmp_path), running(address, "aggregator", REPLIES) as (session, events):
        events.wait(Connected)
        world = World(tmp_path, address, session, events)
        world.start()
        try:
            yield world
        finally:
            world.kill()


@needs_mosquitto
def test_each_submission_is_summed_once(world: World) -> None:
    """The sum is exact and stays the same; what overlaps it, is too small, unknown or forged is refused."""
    request = world.request(NAMES[:3])
    first, reply = world.ask(request), world.reply(request)
    assert is_own_sum(reply, public=world.public["sign_key"], fleet=FLEET)
    assert reply.masks
    np.testing.assert_array_equal(to_array(reply.masks), sum_of(NAMES[:3], VALUES))

    payload = encode(request)
    false = Frame(v=1, digest=digest_of(payload), size_bytes=len(payload), offset=0, data=b"other bytes")
    world.publish(b"", b"garbage", encode(reply), encode(false), encode(replace(false, offset=9)))
    assert world.ask(request) == first
    world.kill()
    world.start()
    assert world.ask(request) == first

    others = world.request(NAMES[3:])
    forged = (*others.submissions[:2], replace(others.submissions[2], sequence=9))
    for refused, problem in (
        (world.request(NAMES[2:]), f"shed-3 {OVERLAP}"),
        (
            world.request(NAMES[3:5]),
            "expected at least 3 submissions, as the second operator requires, got 2",
        ),
        (world.request([*NAMES[3:], "stranger"]), "stranger is not in the second operator's list of devices"),
        (replace(others, submissions=forged), "the signature of the mask of shed-6 is invalid"),
    ):
        assert world.reply(refused).problem == problem
    assert world.reply(others).masks
    assert world.log().count("masks summed task=") == 5
    assert world.log().count("request refused request=") == 4
    world.process.terminate()
    assert world.process.wait(timeout=60) == 0
    assert "Traceback" not in world.log()
