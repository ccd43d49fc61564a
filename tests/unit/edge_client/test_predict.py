"""`edge-client predict`: the images that arguments name, and the formats of its output."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edge_client.cli import cli
from edge_client.storage.stored_values import SubmissionReport
from tests.support.devices.device_bench import CONSTANT, HeadBench
from tests.support.devices.device_factory import image_file


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
    assert list(first) == [
        "image",
        "label_1",
        "probability_1",
        "label_2",
        "probability_2",
        "head_version",
        "prior",
        "answer",
    ]
    assert (first["image"], last["image"]) == ("photos/b.png", "photos/10%, of it.png")
    assert ({first["label_1"], first["label_2"]}, first["head_version"]) == ({"cat", "dog"}, "3")
    assert float(first["probability_1"]) > float(first["probability_2"]) > 0


def _line(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def test_many_alike_images_are_predicted_with_their_prior(bench: HeadBench, photos: Path) -> None:
    """It is shown with each of them; one image, or `--prior none`, gets the head's own probabilities."""
    bench.install(bench.head(1, CONSTANT["cat"] / 4))
    for number in range(60):
        image_file(photos / f"{number}.png")
    plain = _line(_predict(bench, "photos", "--json", "--prior", "none"))
    with_prior = _line(_predict(bench, "photos", "--json"))
    best = plain["label"]
    assert (plain["prior"], "prior_shares" in plain) == ("none", False)
    assert with_prior["prior"] == "images"
    assert with_prior["prior_shares"][best] > 0.9
    assert with_prior["scores"][best] > plain["scores"][best]
    alone = _line(_predict(bench, "photos/b.png", "--json"))
    assert {name: alone[name] for name in ("prior", "scores")} == {
        name: plain[name] for name in ("prior", "scores")
    }
    text = _predict(bench, "photos")
    assert text.stderr.startswith(f"prior: images  {best} 9")
    assert len(text.stderr.splitlines()) == 1
    rows = csv.DictReader(_predict(bench, "photos", "--csv").stdout.splitlines())
    assert {row["prior"] for row in rows} == {"images"}


def test_prior_of_labeled_images(bench: HeadBench, photos: Path) -> None:
    """Those of the submission: 20 of each class."""
    bench.install(bench.head(1, CONSTANT["cat"]))
    assert photos.is_dir()
    line = _line(_predict(bench, "photos/b.png", "--json", "--prior", "labels"))
    assert (line["prior"], line["prior_shares"]) == ("labels", {"cat": 0.5, "dog": 0.5})
    bench.store.set(SubmissionReport())
    done = _predict(bench, "photos/b.png", "--prior", "labels")
    assert "no labeled images" in f"{done.exception} {done.output}"
