"""A proxy between MQTT clients and their broker that parses packets and provokes network faults.

Faults are chosen at random from a seed and counted. They can be changed at any time, from any thread.
"""

import asyncio
import contextlib
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

from protocol.mqtt.reconnecting_session import BrokerAddress

CONNECT, PUBLISH = 1, 3
DUPLICATE = 0b1000
"""Flag in a publication's first byte: it was sent before."""

UNACCEPTABLE_VERSION = bytes((0x20, 2, 0, 1))
"""CONNACK of a broker without MQTT 5."""


@dataclass(frozen=True)
class Connect:
    version: int
    """4 is MQTT 3.1.1, 5 is MQTT 5."""
    client_id: str


@dataclass(frozen=True)
class Publish:
    topic: str
    qos: int
    identifier: int
    """0 with QoS 0."""
    payload: bytes


def kind(packet: bytes) -> int:
    return packet[0] >> 4


async def read_packet(reader: asyncio.StreamReader) -> bytes:
    """Read one whole packet; `asyncio.IncompleteReadError` if the connection ends before."""
    head = await reader.readexactly(2)
    while head[-1] & 0x80:
        head += await reader.readexactly(1)
    length, _ = _varint(head, 1)
    return head + await reader.readexactly(length)


def parse_connect(packet: bytes) -> Connect:
    _, at = _varint(packet, 1)
    name, at = _text(packet, at)
    if name != "MQTT":
        raise ValueError(f"expected MQTT 3.1.1 or 5, got {name!r}")
    version = packet[at]
    at += 4
    if version >= 5:
        length, at = _varint(packet, at)
        at += length
    client_id, _ = _text(packet, at)
    return Connect(version, client_id)


def parse_publish(packet: bytes, *, version: int) -> Publish:
    qos = packet[0] >> 1 & 3
    _, at = _varint(packet, 1)
    topic, at = _text(packet, at)
    identifier = 0
    if qos:
        identifier = int.from_bytes(packet[at : at + 2], "big")
        at += 2
    if version >= 5:
        length, at = _varint(packet, at)
        at += length
    return Publish(topic, qos, identifier, packet[at:])


def puback(identifier: int) -> bytes:
    """Return the acknowledgement of a publication with QoS 1."""
    return bytes((0x40, 2)) + identifier.to_bytes(2, "big")


def _varint(packet: bytes, at: int) -> tuple[int, int]:
    """Return a length of one to four bytes, and where it ends."""
    value = shift = 0
    while True:
        byte = packet[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def _text(packet: bytes, at: int) -> tuple[str, int]:
    end = at + 2 + int.from_bytes(packet[at : at + 2], "big")
    return packet[at + 2 : end].decode(), end


Direction = Literal["up", "down"]
"""From a client to the broker, or from the broker to a client."""

_LAST_OF_BLOB = 5
"""Bytes from the end of a frame to the last one of its blob: an empty key and an empty signature follow."""

LOST_BY_BROKERS = frozenset({"up", "ack", "get", "blk", "cast"})
"""Channels whose messages a broker may lose; the others are retained, and a broker keeps them."""

_BUFFER_BYTES = 64 * 1024
_HOLD_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults of one direction.

    Attributes:
        cut: chance of each publication that the connection ends somewhere within it.
        delay_s: every packet waits up to this long, and those behind it wait for it.
        bytes_per_s: what a connection carries.
        duplicate: chance of a publication to arrive twice.
        reorder: chance of a publication to change places with the next one.
        drop: chance of a publication to vanish, although its sender gets an acknowledgement.
        damage: chance of a frame of a blob to arrive with another last byte of data.
    """

    cut: float = 0.0
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    duplicate: float = 0.0
    reorder: float = 0.0
    drop: float = 0.0
    damage: float = 0.0


CALM = Faults()


@dataclass(frozen=True)
class Seen:
    """A publication that has crossed."""

    client_id: str
    direction: Direction
    topic: str
    payload: bytes


class _Cut(Exception):
    """The connection was cut on purpose."""


class Proxy:
    """Forwards packets between clients and a broker, with faults.

    Args:
        listen: where clients connect.
        broker: the real one.
        seed: of all random choices.
        up: faults on the way to the broker.
        down: faults on the way to a client.
        without_mqtt5: refuse clients that speak MQTT 5, as an older broker does.
        on_seen: called in the proxy's thread with every publication that has crossed whole.

    Attributes:
        counts: how often each fault was provoked.
    """

    def __init__(
        self,
        listen: BrokerAddress,
        broker: BrokerAddress,
        *,
        seed: int,
        up: Faults = CALM,
        down: Faults = CALM,
        without_mqtt5: bool = False,
        on_seen: Callable[[Seen], None] = lambda _: None,
    ) -> None:
        self.address = listen
        self.broker = broker
        self.up = up
        self.down = down
        self.counts: Counter[str] = Counter()
        self._seed = seed
        self.on_seen = on_seen
        self._without_mqtt5 = without_mqtt5
        self._links: dict[int, _Link] = {}
        self._made = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(timeout=120):
            raise OSError(f"the proxy cannot listen on {self.address}")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(timeout=120)

    def calm(self) -> None:
        self.up = self.down = CALM

    def cut(self, name: str = "") -> None:
        """End the connections of clients with `name` in their ids; what is in transit is lost."""
        self._loop.call_soon_threadsafe(self._cut, name)

    def _cut(self, name: str) -> None:
        for link in list(self._links.values()):
            if name in link.connect.client_id:
                link.abort()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        # A small buffer, so that what a killed client had in transit is lost with it.
        listener = socket.create_server((self.address.host, self.address.port))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        server = await asyncio.start_server(self._accept, sock=listener)
        self._started.set()
        await self._over.wait()
        server.close()
        self._cut("")
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=2)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._made += 1
        number = self._made
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, _Cut):
            packet = await read_packet(reader)
            if kind(packet) != CONNECT:
                raise ValueError("expected CONNECT")
            connect = parse_connect(packet)
            if self._without_mqtt5 and connect.version >= 5:
                self.counts["refused MQTT 5"] += 1
                writer.write(UNACCEPTABLE_VERSION)
                await writer.drain()
                raise _Cut
            link = _Link(self, connect, _Side(reader, writer), await self._dial())
            self._links[number] = link
            await link.carry(packet, seed=f"{self._seed}/{number}")
        self._links.pop(number, None)
        writer.transport.abort()

    async def _dial(self) -> "_Side":
        plug = socket.socket()
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        plug.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plug, (self.broker.host, self.broker.port))
        return _Side(*await asyncio.open_connection(sock=plug))

    def faults(self, direction: Direction) -> Faults:
        return self.up if direction == "up" else self.down


class _Side:
    """One end of a link; packets to it are written one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.turn = asyncio.Lock()
        writer.transport.set_write_buffer_limits(high=0)


class _Link:
    def __init__(self, proxy: Proxy, connect: Connect, client: _Side, broker: _Side) -> None:
        self.connect = connect
        self._proxy = proxy
        self._client = client
        self._broker = broker

    def abort(self) -> None:
        self._client.writer.transport.abort()
        self._broker.writer.transport.abort()

    async def carry(self, first: bytes, *, seed: str) -> None:
        """Forward packets both ways until one side ends."""
        self._broker.writer.write(first)
        up, down = random.Random(f"{seed}/up"), random.Random(f"{seed}/down")
        ways = (
            _Way(self._proxy, self.connect, "up", self._client, self._broker, up),
            _Way(self._proxy, self.connect, "down", self._broker, self._client, down),
        )
        tasks = [asyncio.ensure_future(way.run()) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # What a side sent before it ended still reaches the other one.
            await asyncio.wait(tasks, timeout=0.05)
        finally:
            self.abort()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class _Way:
    proxy: Proxy
    connect: Connect
    direction: Direction
    source: _Side
    target: _Side
    chance: random.Random

    async def run(self) -> None:
        """Forward packets until the connection ends."""
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, _Cut):
            while True:
                packet = await read_packet(self.source.reader)
                if kind(packet) == PUBLISH:
                    await self._publication(packet)
                else:
                    await self._pass_on(packet)

    async def _publication(self, packet: bytes) -> None:
        faults, chance = self.proxy.faults(self.direction), self.chance
        message = parse_publish(packet, version=self.connect.version)
        channel = _channel(message.topic)
        if chance.random() < faults.cut:
            await self._cut_within(packet)
        if message.qos and channel in LOST_BY_BROKERS and chance.random() < faults.drop:
            self._count("dropped")
            async with self.source.turn:
                self.source.writer.write(puback(message.identifier))
            return
        if channel == "blk" and chance.random() < faults.damage:
            self._count("damaged")
            at = len(packet) - min(_LAST_OF_BLOB, len(message.payload))
            packet = packet[:at] + bytes((packet[at] ^ 0xFF,)) + packet[at + 1 :]
        if chance.random() < faults.reorder:
            await self._after_the_next(packet, message)
            return
        await self._deliver(packet, message)
        if chance.random() < faults.duplicate:
            self._count("duplicated")
            await self._deliver(bytes((packet[0] | DUPLICATE,)) + packet[1:], message)

    async def _cut_within(self, packet: bytes) -> None:
        self._count("cut")
        await self._write(packet[: self.chance.randrange(len(packet))])
        raise _Cut

    async def _after_the_next(self, packet: bytes, message: Publish) -> None:
        """Forward the next packet first, if one comes soon and is a publication."""
        task = asyncio.ensure_future(read_packet(self.source.reader))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({task}, timeout=_HOLD_S)
        swapped = task.done() and not task.exception() and kind(task.result()) == PUBLISH
        if swapped:
            self._count("reordered")
            other = task.result()
            await self._deliver(other, parse_publish(other, version=self.connect.version))
        await self._deliver(packet, message)
        if not swapped:
            await self._pass_on(await task)

    async def _deliver(self, packet: bytes, message: Publish) -> None:
        await self._pass_on(packet)
        self.proxy.on_seen(Seen(self.connect.client_id, self.direction, message.topic, message.payload))

    async def _pass_on(self, packet: bytes) -> None:
        delay_s = self.proxy.faults(self.direction).delay_s
        if delay_s:
            self._count("delayed")
            await asyncio.sleep(self.chance.uniform(0, delay_s))
        await self._write(packet)

    async def _write(self, packet: bytes) -> None:
        """Write a packet at the link's speed."""
        async with self.target.turn:
            sent = 0
            while sent < len(packet):
                rate = self.proxy.faults(self.direction).bytes_per_s
                piece = packet[sent : sent + (len(packet) if rate is None else max(256, int(rate / 20)))]
                self.target.writer.write(piece)
                await self.target.writer.drain()
                sent += len(piece)
                if rate is not None:
                    self.proxy.counts["bytes throttled"] += len(piece)
                    await asyncio.sleep(len(piece) / rate)

    def _count(self, what: str) -> None:
        self.proxy.counts[what] += 1


def _channel(topic: str) -> str:
    """Return the channel of a topic: its level after the device's name, or after the fleet's."""
    levels = topic.split("/")
    return levels[5] if len(levels) > 5 else levels[-1]
