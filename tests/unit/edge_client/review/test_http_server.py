"""The review page's requests: the token, other web pages, images and moves."""

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from edge_client.review.http_server import ReviewServer
from protocol.mqtt.tls import BrokerAddress
from tests.support.devices.review_folder import TOKEN, ReviewFolder, review_folder, review_page
from tests.support.network.sessions import request

AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def where(tmp_path: Path) -> ReviewFolder:
    return review_folder(tmp_path)


@pytest.fixture
def server(where: ReviewFolder) -> Iterator[ReviewServer]:
    with review_page(where) as server:
        yield server


def _ask(
    server: ReviewServer, path: str, method: str = "GET", headers: Mapping[str, str] = AUTHORIZED
) -> tuple[int, dict[str, str], bytes]:
    return request(BrokerAddress("127.0.0.1", server.server_port), method, path, headers)


def _post(server: ReviewServer, path: str) -> dict[str, Any]:
    status, _, body = _ask(server, path, "POST")
    assert status == 200, body
    content: dict[str, Any] = json.loads(body)
    return content


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/review/findings", "GET"),
        ("/review/image?finding=0", "GET"),
        ("/review/move?finding=0&class=1", "POST"),
        ("/review/undo", "POST"),
    ],
)
def test_images_and_moves_need_the_token(
    where: ReviewFolder, server: ReviewServer, path: str, method: str
) -> None:
    """Other web pages are refused with it, too, and an address that an attacker's DNS server leads here."""
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({**AUTHORIZED, "Origin": "http://attacker.example"}, 403),
        ({**AUTHORIZED, "Sec-Fetch-Site": "cross-site"}, 403),
        ({**AUTHORIZED, "Sec-Fetch-Site": "same-site"}, 403),
        ({**AUTHORIZED, "Host": "attacker.example"}, 421),
        ({**AUTHORIZED, "Host": "127.0.0.1:1"}, 421),
    ):
        assert _ask(server, path, method, headers)[0] == status
    assert (where.data / "cat" / "wrong.png").exists()
    own = f"http://127.0.0.1:{server.server_port}"
    assert (
        _ask(server, path, method, {**AUTHORIZED, "Origin": own, "Sec-Fetch-Site": "same-origin"})[0] == 200
    )


@pytest.mark.parametrize(
    ("path", "media_type"), [("", "text/html"), (".js", "text/javascript"), (".css", "text/css")]
)
def test_page_loads_nothing_from_elsewhere(server: ReviewServer, path: str, media_type: str) -> None:
    status, headers, body = _ask(server, f"/review{path}", headers={})
    assert (status, headers["Content-Type"]) == (200, f"{media_type}; charset=utf-8")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "Set-Cookie" not in headers
    assert b"http:" not in body
    assert b"https:" not in body


def test_image_is_a_small_jpeg(where: ReviewFolder, server: ReviewServer) -> None:
    Image.new("RGBA", (2000, 1000)).save(where.data / "cat" / "wrong.png")
    status, headers, body = _ask(server, "/review/image?finding=0")
    assert (status, headers["Content-Type"]) == (200, "image/jpeg")
    assert Image.open(io.BytesIO(body)).size == (640, 320)
    (where.data / "cat" / "wrong.png").write_bytes(b"no image")
    assert _ask(server, "/review/image?finding=0")[0] == 422


def test_move_and_undo(where: ReviewFolder, server: ReviewServer) -> None:
    """The image of two findings has moved in both."""
    moved = where.data / "cat" / "same.png"
    content = _post(server, "/review/move?finding=1&class=0")
    assert [each["moved_to"] for each in content["findings"]] == [
        None, str(moved), None, None, str(moved), None, None
    ]  # fmt: skip
    assert moved.exists()
    assert _post(server, "/review/move?finding=4&class=2")["findings"][1]["moved_to"] == str(
        where.unlabeled / "same.png"
    )
    _post(server, "/review/undo")
    content = _post(server, "/review/undo")
    assert {each["moved_to"] for each in content["findings"]} == {None}
    assert (where.data / "dog" / "same.png").exists()
    (where.data / "dog" / "same.png").write_bytes(b"changed")
    status, _, body = _ask(server, "/review/move?finding=1&class=0", "POST")
    assert (status, "review the images again" in json.loads(body)["error"]) == (409, True)


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/review/image", "GET", 400),
        ("/review/image?finding=7", "GET", 400),
        ("/review/move?finding=0&class=3", "POST", 400),
        ("/review/move?finding=0&class=-1", "POST", 400),
        ("/review/move?finding=0&class=1", "GET", 404),
        ("/predict", "POST", 404),
    ],
)
def test_other_requests_are_refused(server: ReviewServer, path: str, method: str, status: int) -> None:
    assert _ask(server, path, method)[0] == status
