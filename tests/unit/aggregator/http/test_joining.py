"""`edge-client join` over plain HTTP, with an attacker who reads and changes what passes."""

import base64
import contextlib
import http.client
import http.server
import json
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.commands.session import open_session
from aggregator.security.joining import make_link
from aggregator.storage.store import Store
from edge_client.cli import cli
from edge_client.cli.join import join
from protocol.enrollment import read_enrollment
from protocol.errors import BadSignature, ConfigError, ProtofleetError
from protocol.storage.keyfile import read_key
from protocol.wire.joining import JoinLink, open_answer, signed_request
from protocol.wire.signing import public_key, sign_joined
from tests.support.fleets.command_loop import taking_commands
from tests.unit.aggregator.http.servers import Client, serving
from tests.unit.aggregator.status.stores import started_store

FLEET = "barn"

Change = Callable[[dict[str, Any]], None]


@dataclass
class Attacker:
    """A machine between a device and the aggregator, on plain HTTP."""

    aggregator: Client
    state: Path
    in_request: Change = lambda _: None
    in_answer: Change = lambda _: None
    loses_answer: bool = False
    seen: list[bytes] = field(default_factory=list)
    address: str = ""

    def pass_on(self, path: str, body: bytes) -> tuple[int, bytes]:
        request = json.loads(body)
        self.in_request(request)
        reply = self.aggregator.post(path, request)
        self.seen += [body, reply.body]
        answer = reply.json()
        self.in_answer(answer)
        return reply.status, json.dumps(answer).encode()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("aggregator")
    with contextlib.closing(started_store(folder)) as store, taking_commands(store):
        yield store


@pytest.fixture(scope="module")
def between(store: Store) -> Iterator[Attacker]:
    with serving(store.folder) as (client, _):
        attacker = Attacker(client, store.folder)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status, answer = attacker.pass_on(self.path, body)
                if attacker.loses_answer:
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            attacker.address = f"http://127.0.0.1:{server.server_port}"
            yield attacker
            server.shutdown()


@pytest.fixture
def attacker(between: Attacker) -> Attacker:
    """An attacker who has seen nothing, and changes nothing yet."""
    between.in_request = between.in_answer = lambda _: None
    between.loses_answer = False
    between.seen.clear()
    return between


@pytest.fixture
def shed() -> str:
    """The name of a new device."""
    return f"shed-{secrets.token_hex(4)}"


def link_to(attacker: Attacker, device: str = "") -> JoinLink:
    state = attacker.state
    with open_session(state) as session:
        return make_link(
            session.store,
            address=attacker.address,
            fleet=FLEET,
            device=device,
            broker="broker.example",
            write=session.change_keys,
        )


def test_enrollment_is_complete_and_reveals_no_secret(
    shed: str, attacker: Attacker, store: Store, tmp_path: Path
) -> None:
    """Neither the link's secret nor a private key has passed the network, nor is the secret in the database."""
    link = link_to(attacker)
    join(link, shed, tmp_path / shed)
    enrolled = read_enrollment(tmp_path / shed)
    assert (enrolled.device, enrolled.fleet, enrolled.broker) == (shed, FLEET, "broker.example")
    assert enrolled.aggregator_key == link.key
    store.keys.drop_cache()
    known = store.keys.get(shed)
    assert known is not None
    assert known.enrolled
    assert known.public == public_key(enrolled.signing_key)
    files = [file.read_bytes() for file in store.folder.rglob("*") if file.is_file()]
    tls_key = (tmp_path / shed / "device.key").read_bytes()
    for secret in (link.secret, enrolled.signing_key, b"".join(tls_key.splitlines()[1:-1])):
        for form in (secret, secret.hex().encode(), base64.urlsafe_b64encode(secret).rstrip(b"=")):
            assert not any(form in data.replace(b"\\n", b"") for data in [*attacker.seen, *files])


OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key().public_bytes_raw().hex()
REQUEST = {
    "fleet": "vineyard", "device": "shed-2", "kind": "phone", "key": OTHER, "tls_key": "", "id": "0" * 16,
    "proof": "0" * 64,
}  # fmt: skip
ANSWER = {
    "fleet": "vineyard", "device": "shed-2", "key": OTHER, "request": "0" * 64, "aggregator_key_number": 7,
    "root_key": OTHER, "broker": "attacker.example", "ca_crt": "", "device_crt": "",
}  # fmt: skip


@pytest.mark.parametrize("name", REQUEST)
def test_changed_request_enrolls_nothing(
    name: str, shed: str, attacker: Attacker, store: Store, tmp_path: Path
) -> None:
    """Whichever field is changed, or left out; the link stays good for the device."""
    link = link_to(attacker)
    for change in (lambda sent: sent.update({name: REQUEST[name]}), lambda sent: sent.pop(name)):
        attacker.in_request = change
        with pytest.raises(ConfigError, match="refused by http"):
            join(link, shed, tmp_path / shed)
        store.keys.drop_cache()
        assert store.keys.get(shed) is None
    attacker.in_request = lambda _: None
    join(link, shed, tmp_path / shed)


@pytest.mark.parametrize("name", ANSWER)
def test_changed_answer_is_refused(name: str, shed: str, attacker: Attacker, tmp_path: Path) -> None:
    """Whichever field is changed, also with a signature of the attacker's; then the same command gets the answer."""
    link, key = link_to(attacker), Ed25519PrivateKey.generate().private_bytes_raw()

    def change(sent: dict[str, Any]) -> None:
        content = json.loads(sent["answer"])
        assert content[name] != ANSWER[name]
        sent["answer"] = json.dumps({**content, name: ANSWER[name]})

    def sign(sent: dict[str, Any]) -> None:
        change(sent)
        sent["signature"] = sign_joined(sent["answer"], key=key).hex()

    for attempt in (change, sign):
        attacker.in_answer = attempt
        with pytest.raises(BadSignature, match="not signed by the aggregator's key"):
            join(link, shed, tmp_path / shed)
        assert not (tmp_path / shed).exists()
    attacker.in_answer = lambda _: None
    join(link, shed, tmp_path / shed)


def test_answer_to_another_request_is_refused(shed: str, attacker: Attacker, tmp_path: Path) -> None:
    """It is signed, and of an earlier enrollment of the same device."""
    first, second = link_to(attacker), link_to(attacker)
    join(first, shed, tmp_path / "first")
    recorded = json.loads(attacker.seen[-1])
    attacker.in_answer = lambda sent: sent.update(recorded)
    with pytest.raises(ProtofleetError, match="another request"):
        join(second, "shed-2", tmp_path / "second")


@pytest.mark.parametrize(
    "sent",
    [b"", b"[]", b"{}", b"x" * 300_000, b'{"answer": "", "signature": ""}', b"[" * 100_000, b"\xff\xfe{}"],
    ids=lambda sent: f"{sent[:12]!r}",
)
def test_garbage_is_no_answer(sent: bytes) -> None:
    link = JoinLink(address="http://127.0.0.1", fleet=FLEET, key=bytes(32), secret=bytes(16))
    with pytest.raises(BadSignature):
        open_answer(sent, link=link, request=signed_request(link, "shed-1", "box", key=bytes(32)))


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"x":' + b"[" * 10_000, b'{"fleet": "a b"}', b"\xff"])
def test_garbage_is_no_request(attacker: Attacker, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", attacker.aggregator.port)) as connection:
        connection.request("POST", "/join/enroll", body, headers)
        assert connection.getresponse().status == 400


def test_lost_answer_is_sent_again(shed: str, attacker: Attacker, tmp_path: Path) -> None:
    """With the keys of the first attempt, which stay beside the folder."""
    link = link_to(attacker)
    attacker.loses_answer = True
    with pytest.raises(ConfigError, match="repeat the command"):
        join(link, shed, tmp_path / shed)
    key = read_key(tmp_path / f".{shed}.joining" / "signing.key")
    attacker.loses_answer = False
    join(link, shed, tmp_path / shed)
    assert read_enrollment(tmp_path / shed).signing_key == key
    assert [file.name for file in tmp_path.iterdir()] == [shed]


def test_command_says_how_to_start(
    shed: str, attacker: Attacker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an open fleet, too, where nothing is enrolled; and what is wrong with a link or a folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["join", *arguments])
        return done.output if done.exception is None else str(done.exception)

    link = link_to(attacker, shed)
    assert f"edge-client --enrollment {shed} --data IMAGES" in run(str(link))
    assert f"{shed} exists: give --out a new folder" in run(str(link_to(attacker)), "--device-id", shed)
    assert f"this link is for {shed}" in run(str(link), "--device-id", "shed-2")
    assert "invalid device name 'a/b'" in run(str(link_to(attacker)), "--device-id", "a/b")
    opened = replace(link, secret=b"", name="")
    assert f"--fleet {FLEET} --device-id shed-3 --aggregator-key {link.key.hex()}" in run(
        str(opened), "--device-id", "shed-3"
    )
    for wrong in (
        "",
        "https://host",
        "ftp://host/join/#fleet=a",
        str(link).replace("key=", "key=0"),
        "http://[::1",
    ):
        assert "expected a link as `aggregator enroll --link` prints it" in run(wrong), wrong
    closed_port = replace(link, address="http://127.0.0.1:9")
    assert "no answer from http://127.0.0.1:9/join/enroll" in run(str(closed_port), "--out", "elsewhere")
