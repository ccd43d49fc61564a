"""`edge-client predict`: the images that arguments name, and the formats of its output."""

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edge_client.cli import cli
from tests.support.devices.device_factory import image_file
from tests.support.devices.worker_benches import CONSTANT, HeadBench


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of images, notes and hidden files, in a folder that is the current one."""
    folder = tmp_path / "photos"
    for name in ("b.png", "a.jpg", "deep/er/c.png", ".hidden/d.png", "10%, of it.png"):
        image_file(folder / name)
    (folder / "notes.txt").write_text("no image")
    monkeypatch.chdir(tmp_path)
    return folder


def _predict(bench: HeadBench, *arguments: str, stdin: bytes | None = None) -> Result:
    options = ["--state", str(bench.store.folder), "--provider", "cpu", "--threads", "1"]
    return CliRunner().invoke(cli, ["predict", *arguments, *options], input=stdin)


@pytest.mark.parametrize(
    ("arguments", "stdin", "images"),
    [
        (["photos"], b"", ["photos/10%, of it.png", "photos/a.jpg", "photos/b.png", "photos/deep/er/c.png"]),
        (["photos/*.png"], b"", ["photos/10%, of it.png", "photos/b.png"]),
        (["photos/**/*.png"], b"", ["photos/10%, of it.png", "photos/b.png", "photos/deep/er/c.png"]),
        (["-"], b"photos/b.png\r\n\nphotos/deep\n", ["photos/b.png", "photos/deep/er/c.png"]),
        (["photos/b.png", "photos/a.jpg"], b"", ["photos/b.png", "photos/a.jpg"]),
    ],
)
def test_images_are_named_by_files_folders_patterns_and_stdin(
    bench: HeadBench, photos: Path, arguments: list[str], stdin: bytes, images: list[str]
) -> None:
    """Hidden files and files that are no images are left out of folders."""
    head = bench.head(1, CONSTANT["cat"])
    bench.install(head)
    done = _predict(bench, *arguments, "--json", stdin=stdin)
    assert done.exit_code == 0, (done.output, photos)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["image"] for line in lines] == images
    digests = head.head.digest.hex(), bench.task.hex()
    assert {(line["head_version"], line["head"], line["task"]) for line in lines} == {(1, *digests)}


def test_csv_has_a_header_and_a_row_per_image(bench: HeadBench, photos: Path) -> None:
    """An unusable image is an error on stderr, and the exit status is 1."""
    bench.install(bench.head(3, CONSTANT["dog"]))
    (photos / "broken.png").write_bytes(b"no image")
    done = _predict(
        bench, "photos/b.png", "photos/broken.png", "photos/10%, of it.png", "--csv", "--top", "2"
    )
    assert done.exit_code == 1
    assert "error: photos/broken.png: " in done.stderr
    first, last = csv.DictReader(done.stdout.splitlines())
    assert list(first) == ["image", "label_1", "probability_1", "label_2", "probability_2", "head_version"]
    assert (first["image"], last["image"]) == ("photos/b.png", "photos/10%, of it.png")
    assert ({first["label_1"], first["label_2"]}, first["head_version"]) == ({"cat", "dog"}, "3")
    assert float(first["probability_1"]) > float(first["probability_2"]) > 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["photos/*.gif"], "no file for the pattern photos/*.gif"),
        (["photos/empty"], "no image in photos/empty (1 files: suffix .txt)"),
        (["photos", "--csv", "--json"], "--json and --csv cannot be used together"),
    ],
)
def test_arguments_without_an_image_are_refused(
    bench: HeadBench, photos: Path, arguments: list[str], error: str
) -> None:
    (photos / "empty").mkdir()
    (photos / "empty" / "readme.txt").touch()
    bench.install(bench.head(1, CONSTANT["cat"]))
    done = _predict(bench, *arguments)
    assert done.exit_code != 0
    assert error in f"{done.exception} {done.output}"
