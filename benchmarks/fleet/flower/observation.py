"""Costs of a fleet on this machine: bytes that its clients send and receive, memory and processor time."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import psutil

from benchmarks.processes import free_address
from protocol.mqtt.reconnecting_session import BrokerAddress

SAMPLE_S = 0.5


@dataclass
class Traffic:
    """Bytes through a proxy at `address`, from clients and to them."""

    address: BrokerAddress
    up: int = 0
    down: int = 0


@contextlib.contextmanager
def counting_proxy(server: BrokerAddress) -> Iterator[Traffic]:
    """Forward TCP connections to a server, and count their bytes."""
    traffic = Traffic(free_address())
    loop = asyncio.new_event_loop()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 18):
                traffic.up += len(data) * up
                traffic.down += len(data) * (not up)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, requests = await asyncio.open_connection(server.host, server.port)
        except OSError:  # the client tries again
            writer.close()
            return
        await asyncio.gather(copy(reader, requests, up=True), copy(answers, writer, up=False))

    loop.run_until_complete(asyncio.start_server(serve, traffic.address.host, traffic.address.port))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield traffic
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@dataclass
class Usage:
    """Costs of processes and all that they start: peak of resident memory, and seconds of processor time."""

    memory_bytes: int = 0
    cpu_s: dict[int, float] = field(default_factory=dict)
    """By process, at the last sample."""
    before_s: float = 0.0
    """Before the first one."""

    @property
    def total_cpu_s(self) -> float:
        """Seconds of all processes since the first sample."""
        return sum(self.cpu_s.values()) - self.before_s


@contextlib.contextmanager
def observed(processes: Mapping[str, int]) -> Iterator[dict[str, Usage]]:
    """Sample the trees of processes, given by name, as long as the context lasts."""
    usage = {name: Usage() for name in processes}
    _sample(processes, usage)
    for each in usage.values():
        each.before_s = sum(each.cpu_s.values())
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_S):
            _sample(processes, usage)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield usage
    finally:
        stop.set()
        thread.join()


def _sample(processes: Mapping[str, int], usage: Mapping[str, Usage]) -> None:
    children: dict[int, list[psutil.Process]] = {}
    alive = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process)
        alive[process.pid] = process
    for name, root in processes.items():
        tree = [alive[root]] if root in alive else []
        for each in tree:
            tree += children.get(each.pid, [])
        memory = 0
        for each in tree:
            with contextlib.suppress(psutil.Error):
                times = each.cpu_times()
                usage[name].cpu_s[each.pid] = times.user + times.system
                memory += each.memory_info().rss
        usage[name].memory_bytes = max(usage[name].memory_bytes, memory)
