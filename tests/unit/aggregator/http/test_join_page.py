"""The page for phones: which files are served, with which headers, and over which addresses."""

import contextlib
import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregator.http.join_page import TYPES, FileList, JoinPage
from aggregator.http.page_folders import page_folder, phone_folder
from tests.unit.aggregator.http.servers import TOKEN, Client, serving
from tests.unit.aggregator.status.stores import started_store

pytestmark = pytest.mark.skipif(
    page_folder() is None, reason="the page's libraries are missing: python -m dashboard.vendor"
)
PHONE = Path(__file__).parents[4] / "phone"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server with a token, which nothing below /join/ needs."""
    folder = tmp_path_factory.mktemp("state")
    with (
        contextlib.closing(started_store(folder)),
        serving(folder, token=TOKEN, hosts=("fleet.example",)) as (client, _),
    ):
        yield client


def test_files_have_the_headers_of_an_isolated_page(client: Client) -> None:
    """Threads need isolation, which a worker's script and libraries need, too."""
    for path in ("/join/core/resize.js", "/join/vendor/mqtt.esm.js", "/join/vendor/ort.wasm.min.mjs"):
        answer = client.get(path, Host="fleet.example", X_Forwarded_Proto="https")
        assert (answer.status, answer.headers["content-type"]) == (200, TYPES[".js"]), path
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self' 'wasm-unsafe-eval';" in policy
        assert "connect-src 'self' wss://fleet.example;" in policy
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"
        assert answer.headers["cross-origin-embedder-policy"] == "require-corp"
        assert answer.headers["permissions-policy"] == "camera=(self)"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
    assert client.get("/join/vendor/ort-wasm-simd-threaded.wasm").headers["content-type"] == TYPES[".wasm"]


def test_unchanged_file_is_not_sent_again(client: Client) -> None:
    tag = client.get("/join/core/resize.js").headers["etag"]
    assert client.get("/join/core/resize.js", If_None_Match=tag).status == 304


def test_service_worker_gets_every_file_that_it_lists(client: Client) -> None:
    """All that are served but itself; their version changes with a file."""
    script = client.get("/join/files.js").body.decode()
    listed = json.loads(script.removeprefix("self.FILES = ").removesuffix(";\n"))
    assert {"./", "page/app.js", "style.css", "vendor/mqtt.esm.js"} <= set(listed["files"])
    assert not {"sw.js", "files.js", "tests/vectors.js", "package.json"} & set(listed["files"])
    for name in listed["files"]:
        assert client.get(f"/join/{name.removeprefix('./')}").status == 200, name


def test_page_is_small() -> None:
    """Without ONNX Runtime, at most 250 kB that a server compresses."""
    folder = page_folder()
    assert folder is not None
    listed = json.loads(FileList(PHONE, folder / "vendor").script.split(b" = ")[1].rstrip(b";\n"))["files"]
    paths = [
        folder / name if name.startswith("vendor/") else PHONE / name.replace("./", "index.html")
        for name in listed
    ]
    own = [path for path in paths if not path.name.startswith("ort")]
    assert sum(len(gzip.compress(path.read_bytes())) for path in own) <= 250_000


def test_changed_file_is_another_version(tmp_path: Path) -> None:
    folder, static = page_folder(), tmp_path / "phone"
    assert folder is not None
    static.mkdir()
    (static / "index.html").write_text("one")
    before = FileList(static, folder / "vendor").script
    assert FileList(static, folder / "vendor").script == before
    (static / "index.html").write_text("two")
    assert FileList(static, folder / "vendor").script != before


def test_only_the_files_of_the_page_are_served(client: Client) -> None:
    """No test, no configuration, and nothing outside of the folder."""
    assert (PHONE / "tests" / "vectors.js").is_file()
    for path in (
        *("tests/vectors.js", "package.json", "tsconfig.json", "core", "vendor/", "vendor/LICENSE.mqtt"),
        *("../pyproject.toml", "%2e%2e/dashboard/static/app.js", "vendor/..%2fapp.js", "core%00.js"),
        *("//etc/hostname.js", "..%5c..%5capp.js", "vendor/%2e%2e/%2e%2e/vendor.js"),
    ):
        assert client.get(f"/join/{path}").status == 404, path


def test_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.js").write_text("secret")
    folder = tmp_path / "dashboard" / "phone"
    folder.mkdir(parents=True)
    (folder / "linked.js").symlink_to(tmp_path / "secret.js")
    shutil.copy(PHONE / "core" / "resize.js", folder)
    assert phone_folder(folder.parent / "static") == folder
    page = JoinPage(directory=folder)
    assert page.lookup_path("linked.js") == ("", None)
    assert page.lookup_path("resize.js")[1] is not None


def test_address_without_https_shows_why_not(client: Client) -> None:
    """Unless it is of this machine; then, or behind a proxy with HTTPS, the page is there."""
    for path in ("/join/", "/join/index.html"):
        answer = client.get(path, Host="fleet.example")
        assert answer.status == 403
        assert b"HTTPS" in answer.body
        assert b"--http-cert" in answer.body
        assert "camera" in answer.headers["permissions-policy"]
        assert client.get(path).status in {200, 404}
        assert client.get(path, Host="fleet.example", X_Forwarded_Proto="https").status in {200, 404}
    assert client.get("/join/", Host="attacker.example", X_Forwarded_Proto="https").status == 421


def test_address_without_a_slash_leads_to_the_page(client: Client) -> None:
    answer = client.get("/join")
    assert (answer.status, answer.headers["location"]) == (307, "join/")  # also below a path of a proxy
