"""The HTTP server's options and process."""

import contextlib
import os
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)

from aggregator.http.connection import DESCRIPTORS, allow_descriptors
from aggregator.http.process import listening_settings
from aggregator.http.settings import HttpAddress, HttpSettings, http_settings, parse_address
from aggregator.security.certificate_authority import create_ca, issue_server, utc_now
from aggregator.supervised import ServeState, encode
from protocol.errors import ConfigError
from protocol.mqtt.tls import server_warnings
from protocol.storage.keyfile import write_private
from tests.support.fleets.fleet import wait_until
from tests.unit.aggregator.http.servers import TOKEN, serving, started


def options(address: str | None, file: Path | None = None) -> HttpSettings | None:
    return http_settings(address, token_file=file, hosts=(), extras="aggregator")


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROTOFLEET_HTTP_TOKEN", raising=False)
    monkeypatch.delenv("PROTOFLEET_HTTP_READ_TOKEN", raising=False)


@pytest.fixture
def taken() -> Iterator[HttpAddress]:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield HttpAddress("127.0.0.1", listening.getsockname()[1])


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:8080", "127.0.0.1", 8080), ("[::1]:0", "::1", 0), ("fleet.example:1", "fleet.example", 1)],
)
def test_address(text: str, host: str, port: int) -> None:
    assert parse_address(text) == HttpAddress(host, port)


@pytest.mark.parametrize("text", ["", "8080", ":8080", "localhost", "localhost:", "localhost:65536", "a:b"])
def test_invalid_address_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_address(text)


def test_loopback_is_the_default() -> None:
    found = options(None)
    assert found is not None
    assert (str(found.address), found.is_default, found.token) == ("127.0.0.1:8080", True, "")
    assert options("off") is None


@pytest.mark.parametrize("address", ["0.0.0.0:8080", "[::]:8080", "192.0.2.7:8080", "fleet.example:8080"])
def test_other_addresses_need_a_token(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--http-token-file"):
        options(address)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    found = options(address, tmp_path / "token")
    assert found is not None
    assert found.token == TOKEN
    monkeypatch.setenv("PROTOFLEET_HTTP_TOKEN", TOKEN)
    assert options(address) == found


@pytest.mark.parametrize(
    ("host", "hosts", "name"),
    [
        ("0.0.0.0", (), "localhost"),  # noqa: S104
        ("::", ("fleet.example", "other.example"), "fleet.example"),
        ("127.0.0.1", ("fleet.example",), "127.0.0.1"),
        ("fleet.example", (), "fleet.example"),
    ],
)
def test_logged_address_can_be_opened(host: str, hosts: tuple[str, ...], name: str) -> None:
    assert HttpSettings(address=HttpAddress(host, 80), hosts=hosts).own_name == name


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A server's certificate and its key."""
    issued = issue_server(create_ca("https", now=utc_now()), ["localhost"], now=utc_now(), days=20)
    certificate, key = tmp_path / "https.crt", tmp_path / "https.key"
    certificate.write_bytes(issued.certificate)
    write_private(key, issued.key)
    return certificate, key


def https(certificate: Path | None, key: Path | None) -> HttpSettings | None:
    return http_settings(
        None, token_file=None, hosts=(), extras="aggregator", certificate=certificate, key=key
    )


def test_certificate_that_cannot_be_used_is_one_line(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """At the start, with what is wrong; a key with a password asks for none."""
    certificate, key = pair
    found = https(certificate, key)
    assert found is not None
    assert found.scheme == "https"
    other, locked, text = tmp_path / "other.key", tmp_path / "locked.key", tmp_path / "text"
    made = ec.generate_private_key(ec.SECP256R1())
    kinds: dict[Path, KeySerializationEncryption] = {
        other: NoEncryption(),
        locked: BestAvailableEncryption(b"password"),
    }
    for file, encryption in kinds.items():
        file.write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    text.write_text("no certificate")
    for files, message in (
        ((certificate, None), "--http-cert and --http-key belong together: give both"),
        ((None, key), "--http-cert and --http-key belong together: give both"),
        ((tmp_path / "none", key), f"cannot read {tmp_path / 'none'}: No such file or directory"),
        ((certificate, tmp_path / "none"), f"cannot read {tmp_path / 'none'}: No such file or directory"),
        ((certificate, other), f"{other} does not match the certificate {certificate}: give the key"),
        ((certificate, locked), "expected PEM, and a key without a password"),
        ((text, key), f"cannot use the certificate {text} with the key {key}: expected PEM"),
        ((certificate, text), f"cannot use the certificate {certificate} with the key {text}: expected PEM"),
        ((key, key), f"cannot use the certificate {key} with the key {key}: expected PEM"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            https(*files)


def test_certificate_that_expires_is_a_warning(pair: tuple[Path, Path]) -> None:
    """As is a key that others can read."""
    certificate, key = pair
    (warning,) = server_warnings(certificate, key)
    assert re.fullmatch(r"the certificate \S+ expires on \S+: renew it, and restart the aggregator", warning)
    key.chmod(0o644)
    assert f"every user of this machine can read {key}: chmod 600 {key}" in server_warnings(certificate, key)


def test_short_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("guess me\n")
    with pytest.raises(ConfigError, match="16 characters"):
        options("127.0.0.1:8080", tmp_path / "token")


def test_taken_address(taken: HttpAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was given is an error; the default one is left to the other program."""
    monkeypatch.setattr("aggregator.http.process.LISTEN_S", 0.0)
    with (
        pytest.raises(ConfigError, match="Address already in use"),
        listening_settings(HttpSettings(address=taken), tmp_path),
    ):
        pass
    with listening_settings(HttpSettings(address=taken, is_default=True), tmp_path) as settings:
        assert settings is None


def test_readiness_needs_neither_disk_nor_database(tmp_path: Path) -> None:
    """The supervisor sends why `serve` has ended; the token is written once the state directory can be used."""
    (tmp_path / "state").touch()
    address = HttpAddress("127.0.0.1", 0)
    with started(HttpSettings(address=address, public=True), tmp_path / "state") as (client, server):
        server.send(encode(ServeState("the disk is full: free space", is_ready=False)))
        wait_until(
            "its end",
            lambda: "disk" in client.get("/readyz").body.decode(),
            diagnostics=lambda: "see its log",
        )
        answer = client.get("/readyz")
        assert answer.status == 503
        assert answer.json()["problems"] == ["the aggregator has ended: the disk is full: free space"]


def test_clients_that_do_nothing_are_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a request, within its headers or its body; a client that waits for events is not."""
    starts = (
        b"",
        b"GET /healthz HTTP/1.1\r\nHost: ",
        b"POST /api/v1/commands/promote HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
    )
    monkeypatch.setenv("PYTHONPATH", str(short_request_limit(tmp_path)), prepend=os.pathsep)
    with serving(tmp_path) as (client, _), contextlib.closing(_watching(client.port)) as watching:
        for start in starts:
            with (
                socket.create_connection(("127.0.0.1", client.port), timeout=60) as connection,
                contextlib.suppress(ConnectionError),
            ):
                connection.sendall(start)
                while connection.recv(65_536):
                    pass
        watching.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                assert watching.recv(65_536)


def _watching(port: int) -> socket.socket:
    """Return a connection that waits for events; on a busy machine, the request of one may come too late."""
    while True:
        connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if connection.recv(65_536):
                return connection
        connection.close()


def short_request_limit(folder: Path) -> Path:
    """Write a module that shortens the time limit in the server's process; returns its folder."""
    site = folder / "site"
    site.mkdir()
    lines = ("import aggregator.http.connection", "aggregator.http.connection.REQUEST_S = 0.3", "")
    (site / "sitecustomize.py").write_text("\n".join(lines))
    return site


def test_clients_cannot_fill_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path) as (client, _):
        for _ in range(300):
            with socket.create_connection(("127.0.0.1", client.port), timeout=60) as connection:
                connection.sendall(b"no request\r\n\r\n")
                assert connection.recv(64).startswith(b"HTTP/1.1 400")
    assert 0 < capfd.readouterr().err.count("Invalid HTTP request") < 250


def test_each_start_has_a_new_token(tmp_path: Path) -> None:
    """That of the start before may be known to a program that had the port meanwhile."""
    with serving(tmp_path) as (_, before):
        pass
    with serving(tmp_path) as (client, token):
        assert client.get("/api/v1/session", Authorization=f"Bearer {token}").json()["command"]
        assert client.get("/api/v1/session", Authorization=f"Bearer {before}").status == 401


def test_descriptors_are_allowed_for_all_phones() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    try:
        for before, after in ((most // 2, most), (most, most)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
            allow_descriptors()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (after, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
