"""The options of `aggregator run` for its HTTP server."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.http.process import http_server
from aggregator.http.settings import HttpAddress, HttpSettings, http_settings, parse_address
from protocol.errors import ConfigError
from tests.unit.aggregator.http.servers import TOKEN


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


def test_short_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("guess me\n")
    with pytest.raises(ConfigError, match="16 characters"):
        options("127.0.0.1:8080", tmp_path / "token")


def test_taken_address(taken: HttpAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was given is an error; the default one is left to the other program."""
    monkeypatch.setattr("aggregator.http.process.LISTEN_TIMEOUT_S", 0.0)
    with (
        pytest.raises(ConfigError, match="Address already in use"),
        http_server(HttpSettings(address=taken), tmp_path),
    ):
        pass
    with http_server(HttpSettings(address=taken, is_default=True), tmp_path) as port:
        assert port is None
