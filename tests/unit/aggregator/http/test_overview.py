"""The page over several fleets: what it shows of each, and of one that does not answer as it should."""

import contextlib
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import uvicorn
from msgspec.structs import replace

from aggregator.config.schema import Limits
from aggregator.http import fleets as fleets_module
from aggregator.http.connection import server_config
from aggregator.http.fleets import Fleet, Summaries, read_fleets, summary_of
from aggregator.http.overview import overview
from aggregator.http.settings import HttpAddress, HttpSettings
from aggregator.security.identity import revoke_key
from aggregator.status.model import Attention
from protocol.errors import ConfigError
from tests.support.fleets.fleet import wait_until
from tests.support.messages.submissions import TASK, device_info
from tests.support.network.brokers import free_address
from tests.unit.aggregator.http.servers import TOKEN, Client, serving
from tests.unit.aggregator.status.stores import TASK_FILE, busy_store, started_store


@contextlib.contextmanager
def _answering(status: int, body: bytes, **headers: str) -> Iterator[Fleet]:
    """Run a server that always answers the same; yields it as a fleet."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1" if "Transfer-Encoding" in headers else "HTTP/1.0"

        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield Fleet(url=f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        server.server_close()


def test_each_fleet_is_a_line_of_its_own_dashboard(tmp_path: Path) -> None:
    """Also one that needs a token, one that is stopped, and one that is none."""
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    limits = Limits(max_devices=1)
    orchard = replace(TASK_FILE, fleet="orchard", limits=limits)
    with (
        contextlib.closing(busy_store(tmp_path / "barn")),
        contextlib.closing(started_store(tmp_path / "orchard", orchard)) as store,
        serving(tmp_path / "barn") as (barn, _),
        serving(tmp_path / "orchard", token=TOKEN) as (other, _),
    ):
        for device in "abc":
            store.keys.enroll(device, bytes(32), now_s=1.0)
            store.quarantine.add(TASK, device, reason="far", now_s=2.0)
        store.devices.put_info("b", device_info(), now_s=2.0)
        for device in "bc":
            revoke_key(store, device, now_s=3.0)
        fleets = {
            "barn": Fleet(url=barn.origin, link="https://barn.example/"),
            "orchard": Fleet(url=other.origin, token_file=str(token)),
            "locked": Fleet(url=other.origin),
            "pond": Fleet(url=barn.origin),
        }
        shown = {each.name: each for each in (summary_of(*each) for each in fleets.items())}
    assert shown["barn"].link == "https://barn.example/"
    barn_line, orchard_line = shown["barn"].summary, shown["orchard"].summary
    assert barn_line is not None
    assert orchard_line is not None
    assert (shown["barn"].problem, barn_line.running, barn_line.head) == ("", True, 1)
    assert (barn_line.devices, barn_line.online, barn_line.submissions) == (3, 1, 2)
    assert barn_line.accuracy == pytest.approx(0.9)
    assert orchard_line.attention == (
        Attention("warning", "1 device quarantined", "a"),
        Attention(
            "warning",
            "quota nearly used up",
            "1 of 1 devices (limits.max_devices): raise it in the task file, or revoke or forget devices",
        ),
    )
    assert shown["locked"].problem.endswith("does not answer: it answers 401")
    assert shown["pond"].problem.endswith("is the dashboard of another fleet")
    assert shown["pond"].summary is None


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>"),
        (200, b"[]"),
        (200, b'{"fleet": "a", "running": 1}'),
        (200, b'{"fleet": "\xff"}'),
        (200, b'{"unknown": ' + b"[" * 100_000),
        (302, b""),
        (500, b"{}"),
    ],
)
def test_wrong_answer_is_a_problem_of_its_fleet(status: int, body: bytes) -> None:
    """A redirection is not followed: the token would go elsewhere."""
    with _answering(status, body, Location="http://attacker.example/") as fleet:
        shown = summary_of("a", fleet)
    assert shown.problem.startswith(f"{fleet.url} does not answer")
    assert shown == type(shown)(name="a", link=fleet.url, problem=shown.problem)


CHUNKED = {"Transfer-Encoding": "chunked"}


@pytest.mark.parametrize(
    ("start", "headers", "problem"),
    [
        (b"", {}, "more than 1000 bytes"),
        (b"-1\r\n", CHUNKED, "more than 1000 bytes"),
        (b"-5\r\n", CHUNKED, "does not answer"),
    ],
)
def test_answer_of_any_size_is_not_held(
    start: bytes, headers: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`http.client` reads a chunk of -1 bytes to its end, and raises ValueError for -5."""
    monkeypatch.setattr(fleets_module, "MAX_BYTES", 1000)
    with _answering(200, start + b"x" * 100_000, **headers) as fleet:
        assert problem in summary_of("a", fleet).problem


def test_address_that_cannot_be_sent_is_a_problem_of_its_fleet() -> None:
    """One mistake in the file must not hide the other fleets."""
    for url in ("http://a..example", "http://127.0.0.1:1/\u00e9"):
        assert summary_of("a", Fleet(url=url)).problem.startswith(f"{url} does not answer")


def test_silent_fleet_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once, and shown as silent; the other one is shown again and again."""
    monkeypatch.setattr(fleets_module, "GRACE_S", 0.2)
    monkeypatch.setattr(fleets_module, "AGE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, _answering(500, b"") as fleet:
        here = Summaries({"a": Fleet(url=f"http://127.0.0.1:{silent.getsockname()[1]}"), "b": fleet})
        for _ in range(3):
            a, b = here.current().fleets
            assert "has not answered" in a.problem
            assert "it answers 500" in b.problem
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


@contextlib.contextmanager
def _dripping(head: bytes) -> Iterator[Fleet]:
    """Run a server that sends a beginning of an answer and then a byte at a time, without an end."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.sendall(head)
                while not ended.wait(0.05):
                    self.request.sendall(b"x")

    ended = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield Fleet(url=f"http://127.0.0.1:{server.server_address[1]}")
        finally:
            ended.set()
            server.shutdown()


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nA: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_dripping_fleet_has_a_limit_for_the_whole_answer(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read succeeds in time: in the status line, in a header and in the body."""
    monkeypatch.setattr(fleets_module, "TIMEOUT_S", 0.5)
    with _dripping(head) as fleet:
        assert summary_of("a", fleet).problem.endswith("does not answer: timed out")


def test_program_ends_while_a_fleet_is_asked(tmp_path: Path) -> None:
    """A thread that waits for a fleet, whatever for, does not keep `aggregator dashboard` after SIGTERM."""
    program = (
        "import sys\n"
        "from aggregator.cli.monitoring import dashboard_command\n"
        "from aggregator.http import fleets\n"
        "fleets.TIMEOUT_S = 1e6\n"
        "dashboard_command(sys.argv[1:])\n"
    )
    address, file = free_address(), tmp_path / "fleets.toml"
    with _dripping(b"") as fleet:
        file.write_text(f'[fleets.a]\nurl = "{fleet.url}"\n')
        process = subprocess.Popen([sys.executable, "-c", program, str(file), "--http", str(address)])
        try:
            client = Client(address.port)
            wait_until("an answer", lambda: _asked(client), diagnostics=lambda: "see its log on stderr")
            process.terminate()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


def _asked(client: Client) -> bool:
    with contextlib.suppress(OSError):
        return "has not answered" in client.get("/api/v1/fleets").body.decode()
    return False


@contextlib.contextmanager
def _served(fleets: dict[str, Fleet], *, token: str) -> Iterator[Client]:
    """Serve the overview in a thread; yields a client without a token."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        settings = HttpSettings(address=HttpAddress("127.0.0.1", 0), token=token)
        server = uvicorn.Server(server_config(overview(fleets, settings)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Client(listening.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()


def test_reading_needs_the_token_and_there_are_no_commands() -> None:
    with _served({"a": Fleet(url="http://127.0.0.1:1")}, token=TOKEN) as client:
        assert client.get("/api/v1/fleets").status == 401
        authorized = {"Authorization": f"Bearer {TOKEN}"}
        found = client.get("/api/v1/fleets", **authorized)
        assert [each["name"] for each in found.json()["fleets"]] == ["a"]
        assert found.headers["x-content-type-options"] == "nosniff"
        for path in ("/api/v1/fleets", "/api/v1/commands/revoke"):
            assert client.post(path, {}, **authorized).status in {404, 405}
        assert client.get("/api/v1/fleets", Host="attacker.example").status == 421


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "missing required field `fleets`"),
        ("[fleets]", "expected a table for each fleet"),
        ('[fleets."a/b"]\nurl = "http://localhost"', "expected a name"),
        ('[fleets.a]\nurl = "ftp://localhost"', "`fleets.a.url`: expected http"),
        ('[fleets.a]\nurl = "http://me:secret@localhost"', "`fleets.a.url`: expected http"),
        ('[fleets.a]\nurl = "http://localhost:99999"', "`fleets.a.url`: expected http"),
        (
            '[fleets.a]\nurl = "http://localhost"\nlink = "javascript:alert(1)"',
            "`fleets.a.link`: expected http",
        ),
        ('[fleets.a]\nurl = "http://localhost"\ntoken = "x"', "unknown field `token`"),
        ("[fleets.a", "Expected"),
    ],
)
def test_wrong_file_is_an_error(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "fleets.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_fleets(file)
    assert reason in str(error.value)
    assert "secret" not in str(error.value)
