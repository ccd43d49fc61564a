"""The gateway for phones: challenges, which fleets it serves, and bytes at the pace of the slower side.

tests/system/attacks/test_joining.py has closed fleets, with a broker that has an access list.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import psutil
import pytest

from aggregator.http.challenges import VALID_S, Challenges
from aggregator.storage.store import Store
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.joining import JoinLink
from tests.support.devices.phone import Phone, closing
from tests.support.network.brokers import mosquitto
from tests.support.simulation.clocks import FakeClock
from tests.unit.aggregator.http.servers import TOKEN, Client, serving
from tests.unit.aggregator.status.stores import started_store

OPEN = urlencode({"fleet": "barn", "device": "phone-1"})
"""The query of a phone of an open fleet."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(started_store(tmp_path)) as store:
        yield store


def phone_of(client: Client, host: str = "localhost") -> Phone:
    link = JoinLink(address=f"http://{host}:{client.port}", fleet="barn", key=bytes(32))
    return Phone(link, "phone-1")


def test_challenge_is_good_once_for_a_minute() -> None:
    """Also if it is used before others; and only for the gateway that has made it."""
    clock = FakeClock(1000.0)
    challenges = Challenges(clock.now_s)
    first, second, third = (challenges.make() for _ in range(3))
    assert challenges.use(first)
    assert not challenges.use(first)
    clock.elapsed_s += VALID_S
    assert challenges.use(second)
    clock.elapsed_s += 0.1
    assert not challenges.use(third)
    assert not challenges.use(second)
    assert not challenges.use(first)
    mine = challenges.make()
    assert not Challenges(clock.now_s).use(mine)
    for wrong in (
        "",
        mine[:-1],
        mine + "00",
        mine.upper().replace("0", "G"),
        mine[:-2] + "zz",
        f" {mine[1:]}",
    ):
        assert not challenges.use(wrong)
    assert challenges.use(mine)


def test_open_fleet_is_served_on_this_machine_until_it_is_closed(
    store: Store, address: BrokerAddress
) -> None:
    """Without a challenge; never under another name, by which a proxy may publish it."""
    with (
        mosquitto(address, store.folder),
        serving(store.folder, hosts=("fleet.example",), brokers=(address,)) as (
            client,
            _,
        ),
    ):
        phone = phone_of(client)
        with phone.connected(OPEN) as connection:
            assert phone.refused(urlencode({"fleet": "vineyard", "device": "phone-1"}))[0] == 4404
            with (
                socket.create_connection(("127.0.0.1", client.port)) as plain,
                phone.web_socket(OPEN, name="fleet.example", sock=plain) as other,
            ):
                code, reason = closing(other)
            assert (code, "this fleet or its broker is open to everybody" in reason) == (4401, True)
            store.keys.close_fleet()
            assert closing(connection)[0] == 4401
        assert phone.refused(OPEN)[0] == 4401


def test_published_server_serves_no_open_fleet(store: Store, address: BrokerAddress) -> None:
    with serving(store.folder, token=TOKEN, host="0.0.0.0", brokers=(address,)) as (client, _):  # noqa: S104
        assert phone_of(client).refused(OPEN)[0] == 4401


def test_missing_broker_is_a_reason(store: Store, address: BrokerAddress) -> None:
    with serving(store.folder, brokers=(address,)) as (client, _):
        code, reason = phone_of(client).refused(OPEN)
    assert (code, reason) == (4502, "the aggregator cannot reach the broker: see its log")


def test_proxy_that_passes_on_no_websocket_is_logged(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(store.folder) as (client, _):
        assert client.get("/join/mqtt").status == 426
        assert client.get("/join/mqtt", Sec_WebSocket_Key="A" * 22 + "==").status == 426
    assert capfd.readouterr().err.count("the proxy must pass on Upgrade and Connection") == 1


def test_hostile_handshakes_are_refused(store: Store, address: BrokerAddress) -> None:
    """By HTTP, or by a close frame; the server answers others afterwards."""
    common = (
        "Host: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    )
    with serving(store.folder, brokers=(address,)) as (client, _):
        for lines, expected in (
            (f"{common}Sec-WebSocket-Protocol: \xff\r\n", b"HTTP/1.1 400"),
            (f"{common}X-Any: \xff\r\n", b"HTTP/1.1 400"),
            (f"{common}Origin: null\r\n", b"HTTP/1.1 403"),
            (
                common.replace("localhost", "attacker.example"),
                b"HTTP/1.1 403",
            ),
            (common, b"HTTP/1.1 101"),
        ):
            with socket.create_connection(("127.0.0.1", client.port), timeout=60) as raw:
                raw.sendall(f"GET /join/mqtt?{OPEN} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
                assert raw.recv(12) == expected
        assert client.get("/healthz").status == 200


CHUNK = bytes(range(256)) * 256
CHUNKS = 640
"""40 MiB in all."""
MAX_GROWTH_BYTES = 20 * 1024**2


@pytest.mark.parametrize("direction", ["up", "down"])
def test_slow_side_slows_the_other_one(store: Store, direction: str) -> None:
    """The server keeps little of what one side does not receive yet, and loses nothing."""
    with socket.create_server(("127.0.0.1", 0)) as broker:
        where = BrokerAddress("127.0.0.1", broker.getsockname()[1])
        with serving(store.folder, brokers=(where,)) as (client, _):
            (server,) = (each for each in psutil.Process().children() if "aggregator.http" in each.cmdline())
            with phone_of(client).web_socket(OPEN, max_size=None) as phone, broker.accept()[0] as accepted:
                before = server.memory_info().rss
                send: Callable[[bytes], None] = phone.send if direction == "up" else accepted.sendall
                sent: list[int] = []

                def send_all() -> None:
                    for number in range(CHUNKS):
                        sent.append(number)
                        send(CHUNK)

                sender = threading.Thread(target=send_all)
                sender.start()
                _wait_until_still(lambda: len(sent))
                assert len(sent) < CHUNKS
                assert server.memory_info().rss - before < MAX_GROWTH_BYTES
                received = bytearray()
                while len(received) < CHUNKS * len(CHUNK):
                    received += accepted.recv(2**20) if direction == "up" else phone.recv(decode=False)
                sender.join()
                assert received == CHUNK * CHUNKS


def _wait_until_still(count: Callable[[], int]) -> None:
    """Wait until a count has not changed for two seconds."""
    seen, since_s = count(), time.monotonic()
    while time.monotonic() < since_s + 2:
        if count() != seen:
            seen, since_s = count(), time.monotonic()
        time.sleep(0.1)
