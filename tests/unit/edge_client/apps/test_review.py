"""Review: the findings of a folder, images that move between folders, and the page's requests."""

import errno
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from edge_client.apps.review.findings import suspicious
from edge_client.apps.review.relabeling import NotMoved, Relabeling
from edge_client.apps.review.server import ReviewServer
from edge_client.cli import cli
from edge_client.heads import head
from edge_client.images.decoding import decode, pixel_digest
from edge_client.images.extraction import extract
from edge_client.images.images import LabeledImage, find_images
from edge_client.store import app_files
from edge_client.store.app_files import Kept, write_value
from edge_client.store.culprits import Culprits
from edge_client.store.feature_cache import FeatureCache
from protocol.errors import ConfigError
from protocol.mqtt.tls import BrokerAddress
from tests.support.devices.device_bench import HeadBench
from tests.support.devices.device_factory import CLASSES, image_file, tiny, write_images
from tests.support.devices.review_folder import TOKEN, ReviewFolder, head_file, review_folder, review_page
from tests.support.network.sessions import request


@pytest.fixture
def where(tmp_path: Path) -> ReviewFolder:
    return review_folder(tmp_path)


def test_each_kind_is_found_in_the_order_of_its_scores(where: ReviewFolder) -> None:
    found = where.review()
    shown = [
        (each.kind, each.image.path.name, each.labeled, each.prediction.answer) for each in found.findings
    ]
    assert shown == [
        ("label", "wrong.png", "cat", "dog"),
        ("label", "same.png", "dog", "cat"),
        ("unknown", "stranger.png", "cat", "unrecognized"),
        ("duplicate", "0000.png", "cat", "cat"),
        ("duplicate", "same.png", "dog", "cat"),
        ("unlabeled", "between.png", None, "cat"),
        ("unlabeled", "new.png", None, "cat"),
    ]
    assert [each.same_as for each in found.of_kind("duplicate")] == [
        (where.data / "dog" / "same.png",),
        (where.data / "cat" / "0000.png",),
    ]
    assert (found.images, found.unusable) == (11, ())


def test_held_out_images_are_marked(where: ReviewFolder) -> None:
    """They are those of the device: an image that was in a prototype is none."""
    first, *_ = where.review().findings
    assert first.image.relative == "cat/wrong.png"
    assert (first.held_out, where.review().held_out) == (True, (1, 0))
    found = where.review(grouped={pixel_digest(decode(first.image.path))})
    assert (found.findings[0].held_out, found.held_out) == (False, (1, 1))


def test_limit_is_one_of_each_kind(where: ReviewFolder) -> None:
    found = where.review(limit=1)
    assert [each.kind for each in found.findings] == ["label", "unknown", "duplicate", "unlabeled"]
    assert found.totals == {"label": 2, "unknown": 1, "duplicate": 2, "unlabeled": 2, "stranger": 0}


def test_kept_images_are_no_findings(where: ReviewFolder) -> None:
    """A moved or changed image is another one."""
    first, *others = where.review().findings
    found = where.review(kept={first.image.identity})
    assert [each.image for each in found.findings] == [
        each.image for each in others if each.image != first.image
    ]
    assert (found.totals["label"], found.images) == (1, 11)
    first.image.path.touch()
    assert len(where.review(kept={first.image.identity}).findings) == len(others) + 1


def test_stored_features_need_no_image_and_a_damaged_cache_is_not_used(where: ReviewFolder) -> None:
    expected, cache = where.review(), where.folder / "features.sqlite"
    backbone = tiny(where.folder)
    with closing(FeatureCache(cache)) as opened:
        extract(
            where.images()[:6],
            [backbone.sha256],
            opened,
            open_backbone=lambda _: backbone,
            batch_size=4,
            on_progress=lambda *_: None,
            culprits=Culprits(),
        )
    contents = {image.path: image.path.read_bytes() for image in where.images()[:6]}
    for path, content in contents.items():
        status = path.stat()
        path.write_bytes(bytes(len(content)))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    found = where.review(cache=cache)
    assert found.unusable == ()
    assert {(each.kind, each.image) for each in found.findings} == {
        (each.kind, each.image) for each in expected.findings
    }
    cache.write_bytes(b"damaged")
    assert {path for path, _ in where.review(cache=cache).unusable} == contents.keys()


def test_unusable_images_are_named_and_a_folder_without_images_has_no_findings(where: ReviewFolder) -> None:
    for image in where.images():
        image.path.write_bytes(b"no image")
    found = where.review()
    assert (len(found.unusable), found.findings, found.images) == (11, (), 0)


def test_unlabeled_images_come_by_their_margin_and_unknown_ones_by_their_novelty() -> None:
    rows = np.array([[0.9, 0.1], [0.5, 0.5], [0.6, 0.4], [0.5, 0.5], [0.9, 0.1]], np.float32)
    result = head.Result(rows, np.array([0.1, 0.4, 0.2, 0.1, 0.7], np.float32))
    known, labels = np.array([True, False, True, True, False]), np.array([-1, -1, -1, 0, -1])
    found = suspicious(result, labels, known)
    assert [row for row, _ in found["unlabeled"]] == [2, 0]
    assert [row for row, _ in found["stranger"]] == [4, 1]


@pytest.fixture
def using(tmp_path: Path, bench: HeadBench) -> HeadBench:
    """A device with a head."""
    bench.install(bench.head(1, np.zeros((16, 2)), head_file(tmp_path)))
    return bench


def _command(using: HeadBench, *arguments: str | Path) -> Result:
    options = ["--state", str(using.state), "--provider", "cpu"]
    return CliRunner().invoke(cli, ["review", "--data", *map(str, arguments), *options])


@pytest.mark.parametrize("output", ["--json", "--limit=10"])
def test_command_lists_findings(tmp_path: Path, using: HeadBench, output: str) -> None:
    where = review_folder(tmp_path / "review")
    (where.data / "cat" / "broken.png").write_bytes(b"no image")
    done = _command(using, where.data, "--unlabeled", where.unlabeled, output)
    assert done.exit_code == 0, done.output
    assert "broken.png: it is none of JPEG" in done.stderr
    if output == "--json":
        first, *rest = map(json.loads, done.stdout.splitlines())
        assert len(rest) == 6
        assert (first["kind"], first["labeled"], first["answer"]) == ("label", "cat", "dog")
        assert first["image"] == str(where.data / "cat" / "wrong.png")
        return
    assert "labels to check: 2\n" in done.stdout
    assert "wrong.png: labeled cat (0.0%), the head finds dog (dog 100.0%, cat 0.0%), held out" in done.stdout
    assert "labeled images of no known class: 1\n" in done.stdout
    assert "11 images classified, 3 of 4 held-out images correct" in done.stdout


def test_command_omits_kept_images(tmp_path: Path, using: HeadBench) -> None:
    where = review_folder(tmp_path / "review")
    wrong = next(image for image in where.images() if image.path.name == "wrong.png")
    write_value(using.store.folder, Kept() + wrong.identity)
    for arguments, labels in (([], 1), (["--all"], 2)):
        assert f"labels to check: {labels}\n" in _command(using, where.data, *arguments).stdout


def test_newest_kept_images_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_files, "MOST_KEPT", 2)
    assert (Kept() + "a" + "b" + "a" + "c").images == ("a", "c")


def test_unlabeled_images_among_classes_are_refused(tmp_path: Path, using: HeadBench) -> None:
    """So is a page for labels in a list."""
    data = str(tmp_path / "data")
    listed = tmp_path / "images.csv"
    listed.write_text("path,label\n")
    (tmp_path / "empty").mkdir()
    for arguments, error in (
        ([data, "--unlabeled", f"{data}/new"], "expected a folder of unlabeled images outside of"),
        ([data, "--unlabeled", str(tmp_path)], "expected a folder of unlabeled images outside of"),
        ([data, "--unlabeled", str(tmp_path.parent / "missing")], "cannot be read"),
        ([str(tmp_path / "empty")], "has no image of cat, dog: one folder for each class"),
        ([str(listed), "--page"], "change them there"),
    ):
        done = _command(using, *arguments)
        assert done.exit_code != 0
        assert error in f"{done.exception} {done.output}"


CAT, DOG = 0, 1


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_images(tmp_path / "data", count=2)


@pytest.fixture
def image(data: Path) -> LabeledImage:
    return find_images(data, CLASSES)[0]


def _contents(*folders: Path) -> list[bytes]:
    return sorted(path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file())


def test_image_moves_under_a_free_name_and_back(data: Path, image: LabeledImage) -> None:
    before, folders = _contents(data), Relabeling(data, CLASSES, None)
    moved = folders.move(image, image.path, DOG)
    assert moved == data / "dog" / "0000-2.png"
    assert folders.move(image, moved, DOG) == moved
    assert folders.undo() == (moved, image.path)
    assert folders.undo() is None
    assert image.is_unchanged()
    assert _contents(data) == before


def test_image_of_a_subfolder_is_in_its_class_and_comes_back_to_the_subfolder(data: Path) -> None:
    image_file(data / "cat" / "2024" / "x.png")
    image = next(each for each in find_images(data, CLASSES) if each.relative == "cat/2024/x.png")
    folders = Relabeling(data, CLASSES, None)
    assert folders.move(image, image.path, CAT) == image.path
    assert folders.undo() is None
    moved = folders.move(image, image.path, DOG)
    assert folders.move(image, moved, CAT) == image.path


def test_failed_undo_can_be_repeated(
    data: Path, image: LabeledImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the image is gone: the moves before it can still be undone."""
    folders = Relabeling(data, CLASSES, None)
    other = next(each for each in find_images(data, CLASSES) if each.relative == "cat/0001.png")
    moved, gone = (folders.move(each, each.path, DOG) for each in (image, other))
    gone.unlink()
    with pytest.raises(NotMoved, match="No such file"):
        folders.undo()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", partial(_fail, errno.ENOSPC))
        with pytest.raises(NotMoved, match="No space left"):
            folders.undo()
    assert folders.undo() == (moved, image.path)


def test_folder_of_a_class_is_made_and_an_existing_one_is_found_by_its_normal_form(
    data: Path, image: LabeledImage
) -> None:
    decomposed = data / "cafe\u0301"
    decomposed.mkdir()
    folders = Relabeling(data, ("caf\u00e9", "bird"), None)
    moved = folders.move(image, image.path, 0)
    assert moved.parent == decomposed
    assert folders.move(image, moved, 1) == data / "bird" / image.path.name


@pytest.fixture
def other_disk(data: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")  # noqa: S108 - a disk, not a file of ours
    if not memory.is_dir() or memory.stat().st_dev == data.stat().st_dev:
        pytest.skip("no other disk")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder) / "others"


def test_image_moves_to_another_disk_and_back(data: Path, image: LabeledImage, other_disk: Path) -> None:
    content, folders = image.path.read_bytes(), Relabeling(data, CLASSES, other_disk)
    moved = folders.move(image, image.path, None)
    assert (moved, moved.read_bytes(), image.path.exists()) == (other_disk / image.path.name, content, False)
    folders.undo()
    assert image.is_unchanged()


@pytest.mark.parametrize("fault", ["changed", "missing", "link", "no folder"])
def test_image_that_is_not_the_one_that_was_found_stays(data: Path, image: LabeledImage, fault: str) -> None:
    if fault == "changed":
        image.path.write_bytes(b"changed")
    elif fault == "missing":
        image.path.unlink()
    elif fault == "link":
        image.path.rename(data / "target.png")
        image.path.symlink_to(data / "target.png")
    before, label = _contents(data), None if fault == "no folder" else DOG
    with pytest.raises(NotMoved, match=r"review the images again|no folder for images"):
        Relabeling(data, CLASSES, None).move(image, image.path, label)
    assert _contents(data) == before


def _fail(code: int, *_: object) -> None:
    raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EXDEV])
def test_disk_that_fails_loses_nothing(
    data: Path, image: LabeledImage, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Nothing is left at the new place."""
    before = _contents(data)
    monkeypatch.setattr(Path, "replace", partial(_fail, code))
    monkeypatch.setattr(shutil, "copy2", partial(_fail, code))
    with pytest.raises(NotMoved, match="cannot be moved into"):
        Relabeling(data, CLASSES, None).move(image, image.path, DOG)
    assert _contents(data) == before


def test_names_that_no_folder_can_have_are_refused(data: Path) -> None:
    for name in ("a/b", "..", ""):
        with pytest.raises(ConfigError, match="no folder can have the name of the class"):
            Relabeling(data, ("cat", name), None)


AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


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
    Image.new("RGBA", (2000, 1000), "red").save(where.data / "cat" / "wrong.png")
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
