"""`edge-client serve`: predictions over HTTP, and requests that it refuses."""

import contextlib
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from PIL import Image

from edge_client.apps.head_in_use import HeadInUse
from edge_client.apps.http import connections as http_connections
from edge_client.apps.http import limits
from edge_client.apps.http.connections import Connections, TokenGuesses
from edge_client.apps.http.options import parse_options
from edge_client.apps.http.server import PredictionServer
from edge_client.cli import cli
from edge_client.graphs.session import release_memory
from edge_client.heads.class_prior import Setting
from edge_client.store.stored_values import ClassReport, SubmissionReport
from protocol.errors import ConfigError
from protocol.mqtt.tls import BrokerAddress
from tests.support.devices.device_bench import CONSTANT, HeadBench
from tests.support.devices.device_factory import noise
from tests.support.network.sessions import request

MAX_BYTES = 100_000
TOKEN = "the-device-token"

Start = Callable[..., AbstractContextManager[int]]
Answer = tuple[int, dict[str, Any]]


def _png() -> bytes:
    file = io.BytesIO()
    noise().save(file, "PNG")
    return file.getvalue()


PNG = _png()


@pytest.fixture
def start(bench: HeadBench) -> Start:
    """Return a function that serves the device's heads, by default a first one, and yields the port."""

    @contextlib.contextmanager
    def started(
        token: str | None = None, prior: Setting = "none", *, with_head: bool = True
    ) -> Iterator[int]:
        if with_head:
            bench.install(bench.head(1, CONSTANT["cat"]))
        options = parse_options("127.0.0.1:0", token=token, max_image_bytes=MAX_BYTES)
        heads = HeadInUse(bench.store, provider="cpu", threads=1, prior=prior)
        with PredictionServer(options, heads) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            try:
                yield server.server_port
            finally:
                server.shutdown()
                thread.join()

    return started


def _ask(
    port: int, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> Answer:
    status, _, answer = request(BrokerAddress("127.0.0.1", port), method, path, headers or {}, body)
    return status, json.loads(answer or b"{}")


def _send(port: int, request: bytes) -> bytes:
    """Send bytes and the end of them, and return the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65_536):
                answer += part
        return answer


def test_newest_head_answers(bench: HeadBench, start: Start) -> None:
    """The server needs no restart for the first head, nor for the next one."""
    with start(with_head=False) as port:
        assert _ask(port, "GET", "/healthz") == (503, {"status": "no head"})
        assert _ask(port, "POST", "/predict", PNG)[0] == 503
        for version in (1, 2):
            head = bench.head(version, CONSTANT["cat"] * version)
            bench.install(head)
            identity = {
                "head_version": version,
                "round": None,
                "head": head.head.digest.hex(),
                "task": bench.task.hex(),
            }
            assert _ask(port, "GET", "/healthz") == (200, {"status": "ok", **identity})
            status, answer = _ask(port, "POST", "/predict?top=2", PNG)
            assert (status, set(answer["scores"])) == (200, {"cat", "dog"})
            assert {name: answer[name] for name in identity} == identity
            assert answer["label"] == max(answer["scores"], key=answer["scores"].get)


def test_answers_depend_on_earlier_images_only_with_a_prior_that_they_show(
    bench: HeadBench, start: Start
) -> None:
    """Another head begins without any; an image that cannot be read does not count.

    A device with labels has their prior, until 20 images are not likelier with it.
    """
    bench.install(bench.head(1, CONSTANT["cat"] / 4))
    with start(with_head=False) as port:
        answers = [_ask(port, "POST", "/predict", PNG)[1] for _ in range(30)]
    assert answers == [answers[0]] * 30
    assert (answers[0]["prior"], "prior_shares" in answers[0]) == ("none", False)
    bench.store.set(SubmissionReport())
    with start(prior="auto", with_head=False) as port:
        answers = [_ask(port, "POST", "/predict", PNG)[1] for _ in range(30)]
        label, plain = answers[0]["label"], answers[0]["scores"]
        assert (answers[0]["prior"], answers[-1]["prior"]) == ("none", "images")
        assert answers[-1]["prior_shares"][label] > 0.9
        assert answers[-1]["scores"][label] > plain[label]
        assert all(each["scores"] == plain for each in answers if each["prior"] == "none")
        assert _ask(port, "POST", "/predict", b"no image")[0] == 422
        bench.install(bench.head(2, CONSTANT["dog"] / 4))
        newer = _ask(port, "POST", "/predict", PNG)[1]
        assert newer["prior"] == "none"
    more, less = newer["scores"]
    for name, last in (
        (more, ["labels", "likelier than no prior"]),
        (less, ["none", "no likelier than no prior"]),
    ):
        bench.store.set(SubmissionReport((ClassReport(name, 9, 0, (9,)),)))
        with start(prior="auto", with_head=False) as port:
            answers = [_ask(port, "POST", "/predict", PNG)[1] for _ in range(20)]
        reasons = [[each["prior"], each["prior_reason"]] for each in answers]
        assert reasons == [["labels", "fewer than 20 predictions"]] * 19 + [last]


@pytest.mark.parametrize(
    ("status", "method", "path", "body", "headers"),
    [
        (404, "GET", "/", None, {}),
        (404, "POST", "/other", PNG, {}),
        (405, "PUT", "/predict", PNG, {}),
        (411, "POST", "/predict", None, {"Content-Length": "-5"}),
        (411, "POST", "/predict", PNG, {"Transfer-Encoding": "chunked"}),
        (415, "POST", "/predict", PNG, {"Content-Type": "multipart/form-data; boundary=x"}),
        (413, "POST", "/predict", bytes(MAX_BYTES + 1), {}),
        (400, "POST", "/predict?top=0", PNG, {}),
        (422, "POST", "/predict", b"no image", {}),
        (422, "POST", "/predict", PNG[:-100], {}),
        (422, "POST", "/predict", b"", {}),
        (421, "POST", "/predict", PNG, {"Host": "attacker.example"}),
        (421, "GET", "/healthz", None, {"Host": "attacker.example:8090"}),
        (403, "POST", "/predict", PNG, {"Origin": "http://attacker.example"}),
        (403, "POST", "/predict", PNG, {"Sec-Fetch-Site": "cross-site"}),
    ],
)
def test_unsuitable_requests_are_refused(
    start: Start, status: int, method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> None:  # fmt: skip
    """With a reason; the next request is answered."""
    with start() as port:
        refused, answer = _ask(port, method, path, body, headers)
        assert (refused, list(answer)) == (status, ["error"])
        assert _ask(port, "POST", "/predict", PNG)[0] == 200


def test_bytes_that_are_no_request_end_their_connection_only(start: Start) -> None:
    length = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    with start() as port:
        assert b" 400 " in _send(port, b"\x16\x03\x01\x02\x00\r\n\r\n")
        assert b" 400 " in _send(port, length + b"short")
        _send(port, b"")
        assert _ask(port, "POST", "/predict", PNG)[0] == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (limits.MAX_HEAD_BYTES - 49),
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 101,
        b"GET /" + b"a" * limits.MAX_HEAD_BYTES,
    ],
)
def test_headers_past_their_limit_are_refused_and_not_cut(start: Start, head: bytes) -> None:
    """A web page would hide its Origin there."""
    with start() as port:
        assert b" 431 " in _send(port, head + b"\r\nOrigin: http://attacker.example\r\n\r\n")
        assert b" 200 " in _send(port, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: y\r\n\r\n")


def test_announced_images_take_no_place(start: Start) -> None:
    """Connections that announce the largest images and send two bytes leave room for those that arrive."""
    begin = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\nab"
    with start() as port, contextlib.ExitStack() as stalled:
        for _ in range(3 * limits.MAX_IMAGES):
            connection = stalled.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            connection.sendall(begin)
        assert _ask(port, "POST", "/predict", PNG)[0] == 200


def test_bytes_in_memory_are_limited(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of images that have not arrived completely count, until their connection ends."""
    monkeypatch.setattr(limits, "MAX_IMAGES", 1)
    begin = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
    is_full, is_empty, count_bytes = threading.Event(), threading.Event(), PredictionServer.count_bytes

    def observed(server: PredictionServer, size_bytes: int) -> None:
        count_bytes(server, size_bytes)
        if server._received_bytes in {0, MAX_BYTES - 1}:
            (is_full if server._received_bytes else is_empty).set()

    monkeypatch.setattr(PredictionServer, "count_bytes", observed)
    with start() as port:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(begin + bytes(MAX_BYTES - 1))
            assert is_full.wait(timeout=60)
            assert _ask(port, "POST", "/predict", PNG)[0] == 503
        assert is_empty.wait(timeout=60)
        assert _ask(port, "POST", "/predict", PNG)[0] == 200


def test_answer_arrives_before_the_connection_ends_beside_unread_bytes(start: Start) -> None:
    """A connection that is closed with unread bytes is reset, and the client could lose the answer."""
    with start(TOKEN) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")
        answer = connection.recv(65_536)
        connection.sendall(bytes(1_000_000))
        while part := connection.recv(65_536):
            answer += part
    assert b" 401 " in answer


@pytest.mark.parametrize(("request_s", "grace_s"), [(0.5, 3600.0), (3600.0, 0.5)])
def test_slow_body_is_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch, request_s: float, grace_s: float
) -> None:
    """The time limit is that of the whole request, however often bytes arrive, and shorter if they are few."""
    monkeypatch.setattr(limits, "REQUEST_S", request_s)
    monkeypatch.setattr(limits, "GRACE_S", grace_s)
    with start() as port, socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        assert b" 408 " in connection.recv(65_536)


def test_slow_headers_are_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_S", 0.5)
    with start() as port, socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"POST /pred")
        assert connection.recv(65_536) == b""


@pytest.mark.parametrize(
    ("token", "begin"),
    [
        (TOKEN, b"GET"),
        (TOKEN, b"GET /healthz HTTP/1.1\r\n\r\n"),
        (
            None,
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n",
        ),
    ],
)
def test_slow_connections_without_a_token_stop_no_other(
    start: Start, token: str | None, begin: bytes
) -> None:
    """Neither in a request, nor after its answer: the oldest ends for a new one."""
    with start(token) as port, contextlib.ExitStack() as stalled:
        for _ in range(http_connections.MAX_CONNECTIONS):
            connection = stalled.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            connection.sendall(begin)
            if b"Expect" in begin:
                assert b" 100 " in connection.recv(65_536)
        given = {"Authorization": f"Bearer {token}"} if token else {}
        assert _ask(port, "POST", "/predict", PNG, given)[0] == 200


def test_connection_is_refused_while_others_are_answered(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connections, "add", lambda *_: False)
    with start() as port, socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        # Without a request: if it arrives after the end of the connection, the answer is lost.
        assert b" 503 " in connection.makefile("rb").read()


@pytest.mark.parametrize(
    ("older", "newest", "ended"),
    [
        (["10.0.0.1", "10.0.0.2", "10.0.0.2"], "10.0.0.3", 1),
        (["10.0.0.1", "10.0.0.2", "10.0.0.3"], "10.0.0.3", 0),
        (["10.0.0.1", "2001:db8::1", "2001:db8::2"], "10.0.0.3", 1),
        (["2001:db8::1", "::ffff:10.0.0.2", "::ffff:10.0.0.2"], "::ffff:10.0.0.3", 1),
        (["10.0.0.1 held", "10.0.0.1 held", "10.0.0.2"], "10.0.0.3", 2),
        (["10.0.0.1 held", "10.0.0.2 held", "10.0.0.3 held"], "10.0.0.4", None),
    ],
)
def test_connection_of_the_address_that_has_the_most_ends_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch, older: list[str], newest: str, ended: int | None
) -> None:
    """The oldest of them; none with an authorized request. An IPv6 client has all addresses of a half."""
    monkeypatch.setattr(http_connections, "MAX_CONNECTIONS", len(older))
    connections = Connections()
    with contextlib.ExitStack() as stack:
        pairs = [[stack.enter_context(each) for each in socket.socketpair()] for _ in range(len(older) + 1)]
        for text, (own, _) in zip(older, pairs, strict=False):
            assert connections.add(own, text.split()[0])
            connections.hold(own, is_held="held" in text)
        assert connections.add(pairs[-1][0], newest) == (ended is not None)
        for number, (own, client) in enumerate(pairs[:-1]):
            if number == ended:
                assert client.makefile("rb").read() == http_connections.BUSY
                with pytest.raises(ConnectionAbortedError):
                    connections.hold(own)
            else:
                connections.hold(own)


def test_small_file_of_a_large_image_leaves_no_memory(start: Start) -> None:
    """98 bytes are 36 million pixels, whose memory is returned to the system."""
    file = io.BytesIO()
    Image.new("RGB", (6000, 6000)).save(file, "WEBP", lossless=True, method=0)
    assert len(file.getvalue()) < 100
    with start() as port:
        assert _ask(port, "POST", "/predict", PNG)[0] == 200
        release_memory()
        before_bytes = psutil.Process().memory_info().rss
        assert _ask(port, "POST", "/predict", file.getvalue())[0] == 200
        assert psutil.Process().memory_info().rss - before_bytes < 50e6


def test_token_is_required(start: Start) -> None:
    """Of predictions, not of the health check; with a token, any Host is accepted."""
    request = b"POST /predict HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
    with start(TOKEN) as port:
        assert _ask(port, "GET", "/healthz")[0] == 200
        assert b"\r\nWWW-Authenticate: Bearer\r\n" in _send(port, request)
        for given in ({}, {"Authorization": "Bearer other"}, {"Authorization": f"Basic {TOKEN}"}):
            assert _ask(port, "POST", "/predict", PNG, given)[0] == 401
        given = {"Authorization": f"Bearer {TOKEN}", "Host": "camera.example"}
        assert _ask(port, "POST", "/predict", PNG, given)[0] == 200


def test_head_request_has_the_answer_of_get_without_its_body(start: Start) -> None:
    with start() as port:
        head, answer = (
            _send(port, method + b" /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").partition(b"\r\n\r\n")
            for method in (b"HEAD", b"GET")
        )
    assert (head[0].split(b"\r\n")[0], head[2]) == (b"HTTP/1.1 200 OK", b"")
    assert f"Content-Length: {len(answer[2])}".encode() in head[0]


def test_body_that_curl_has_changed_is_explained(start: Start) -> None:
    """`curl -d @photo.jpg` omits line breaks and null bytes, which each image has."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    with start() as port:
        assert _ask(port, "POST", "/predict", PNG, form)[0] == 200
        changed = PNG.translate(None, b"\r\n\0")
        for body, is_changed in ((changed, True), (b"photo.jpg", True), (PNG[:-100], False), (b"", False)):
            status, answer = _ask(port, "POST", "/predict", body, form)
            assert (status, "curl --data-binary" in answer["error"]) == (422, is_changed)
        assert "curl" not in _ask(port, "POST", "/predict", changed)[1]["error"]


def test_client_is_asked_to_continue_once_its_token_is_checked(start: Start) -> None:
    begin = f"POST /predict HTTP/1.1\r\nContent-Length: {len(PNG)}\r\nExpect: 100-continue\r\nAuthorization: Bearer "
    with start(TOKEN) as port:
        assert _send(port, f"{begin}other\r\n\r\n".encode()).startswith(b"HTTP/1.1 401 ")
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(f"{begin}{TOKEN}\r\n\r\n".encode())
            answers = connection.makefile("rb")
            assert answers.readline() == b"HTTP/1.1 100 Continue\r\n"
            connection.sendall(PNG)
            assert b"HTTP/1.1 200 OK" in answers.read()


def test_wrong_tokens_of_an_address_are_limited(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another one they are not; a correct token is not answered beside too many wrong ones."""
    guesses, answered = TokenGuesses(), http_connections.WRONG_TOKENS
    wrong = [guesses.may_answer("10.0.0.1", is_correct=False, now_s=5.0) for _ in range(answered + 1)]
    assert wrong == [True] * answered + [False]
    assert not guesses.may_answer("10.0.0.1", is_correct=True, now_s=5.0)
    assert guesses.may_answer("10.0.0.2", is_correct=True, now_s=5.0)
    later_s = 5.0 + http_connections.WRONG_TOKEN_S
    assert [guesses.may_answer("10.0.0.1", is_correct=False, now_s=later_s) for _ in range(2)] == [
        True,
        False,
    ]
    monkeypatch.setattr(http_connections, "WRONG_TOKEN_S", 3600.0)
    with start(TOKEN) as port:
        given = [{"Authorization": f"Bearer {text}"} for text in [*["other"] * (answered + 1), TOKEN]]
        found = [_ask(port, "POST", "/predict", PNG, each)[0] for each in given]
        assert found == [401] * answered + [429] * 2
        assert _ask(port, "GET", "/healthz")[0] == 200


@pytest.mark.parametrize("variable", [None, "x"])
def test_short_token_is_refused(tmp_path: Path, variable: str | None) -> None:
    (tmp_path / "token").write_text("x\n")
    file = [] if variable else ["--http-token-file", str(tmp_path / "token")]
    runner = CliRunner(env={"PROTOFLEET_HTTP_TOKEN": variable})
    error = runner.invoke(cli, ["serve", "--state", str(tmp_path), *file]).exception
    assert "expected a token of at least 16 characters, got 1: make one with" in str(error)


@pytest.mark.parametrize(
    ("address", "token", "error"),
    [
        ("0.0.0.0:80", None, "--http-token-file"),
        ("[::]:80", None, "--http-token-file"),
        ("127.0.0.1", None, "HOST:PORT"),
        ("127.0.0.1:65536", None, "HOST:PORT"),
    ],
)
def test_address_that_others_reach_requires_a_token(address: str, token: str | None, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse_options(address, token=token, max_image_bytes=1)
    assert parse_options("[::1]:8090", token=None, max_image_bytes=1).is_local
    assert not parse_options("0.0.0.0:8090", token=TOKEN, max_image_bytes=1).is_local
