import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from benchmarks.__main__ import cli
from benchmarks.data.images import load_data
from protocol.errors import ConfigError
from tests.benchmarks.feature_factory import fill_data, fill_weights, make_folders

BACKBONE = "tf_mobilenetv3_small_100"
SMALL = ("--data", "mnist", "--backbone", BACKBONE, "--image-size", "32")


def _fedtc(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["accuracy", "fedtc", *SMALL, *arguments])


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folders for data, weights and features."""
    make_folders(tmp_path, monkeypatch)
    return tmp_path


def test_fedtc_benchmark_writes_its_report(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command exports the backbone, extracts, runs every partition and seed, and writes what it printed.

    A second run needs no images, and gives the same.
    """
    fill_data(folders, train=800, test=200)
    size = fill_weights(folders, monkeypatch, BACKBONE)
    report = folders / "report.json"
    runs = ("--partition", "sharding:2", "--partition", "dirichlet:0.5", "--seed", "0", "--seed", "1")
    result = _fedtc(*runs, "--recipe", "paper", "--epochs", "2", "--json", str(report))
    assert result.exit_code == 0, result.output
    figures: dict[str, Any] = json.loads(report.read_text())
    partitions = ("sharding:2", "dirichlet:0.5", "all features")
    made = [(run["partition"], run["seed"]) for run in figures["runs"]]
    assert made == [(partition, seed) for partition in partitions for seed in (0, 1)]
    others = 10 * (size * 4 + 300)  # of each device: ranges of values, and all that is no tensor
    for run in figures["runs"][:4]:
        assert run["tensor_bytes"] == run["prototypes"] * size
        assert run["tensor_bytes"] < run["bytes_up"] < run["tensor_bytes"] + others
        assert f"{run['accuracy']:.2%}" in result.stdout
    assert all(run["epochs"] == 2 for run in figures["runs"])
    for partition in partitions:
        both = [run["accuracy"] for run in figures["runs"] if run["partition"] == partition]
        assert figures["accuracy"][partition] == pytest.approx(sum(both) / 2)
    assert not figures["recipe"]["restore"]
    (folders / "data" / "mnist.npz").unlink()
    options = ("--partition", "sharding:2", "--recipe", "paper", "--epochs", "2", "--no-ceiling")
    again = _fedtc(*options, "--json", str(report))
    first, second = (
        next(line for line in run.stdout.splitlines() if line.startswith("sharding:2")).rsplit(maxsplit=1)[0]
        for run in (result, again)
    )
    assert first == second


def test_few_images_of_each_class(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others with each seed, for the fleet as for all features."""
    fill_data(folders, train=800, test=200)
    fill_weights(folders, monkeypatch, BACKBONE)
    report = folders / "report.json"
    options = ("--partition", "dirichlet:0.5", "--images", "9", "--seed", "0", "--seed", "1")
    result = _fedtc(*options, "--clients", "1", "--json", str(report))
    assert result.exit_code == 0, result.output
    runs = json.loads(report.read_text())["runs"]
    assert [run["images"] for run in runs[2:]] == [90] * 2
    assert runs[2]["accuracy"] != runs[3]["accuracy"]


def test_domains_in_an_archive_are_pooled(folders: Path) -> None:
    """Half of each class of each domain of PACS is for training."""
    with zipfile.ZipFile(folders / "data" / "pacs.zip", "w") as archive:
        for domain in ("photo", "art_painting", "cartoon", "sketch"):
            for number in range(4):
                image = io.BytesIO()
                Image.new("RGB", (16, 16), (50 * number,) * 3).save(image, "JPEG")
                archive.writestr(f"{domain}/{'dog' if number < 2 else 'cat'}/{number}.jpg", image.getvalue())
    data = load_data("pacs")
    assert data.train.images.shape == data.test.images.shape == (8, 16, 16, 3)
    assert data.train.labels.tolist() == [0, 1] * 4
    assert len(load_data("pacs_sketch").train.labels) == 2


def test_missing_files_are_named(folders: Path) -> None:
    """Without weights or data the error names the expected path."""
    with pytest.raises(ConfigError, match="PROTOFLEET_BENCH_WEIGHTS"):
        raise _fedtc().exception or AssertionError
    with pytest.raises(ConfigError, match=r"mnist\.npz.*PROTOFLEET_BENCH_DATA"):
        load_data("mnist")


def test_invalid_partition_is_a_usage_error(folders: Path) -> None:
    """Exit status 2, with the expected format."""
    result = _fedtc("--partition", "halves")
    assert result.exit_code == 2
    assert "sharding:2" in result.output


def test_folders_in_an_archive(folders: Path) -> None:
    """CIFAR-10's classes are numbered in the order of their names, whatever the order in the archive."""
    with zipfile.ZipFile(folders / "data" / "cifar10.zip", "w") as archive:
        for part in ("test", "train"):
            for name, shade in (("truck", 200), ("cat", 0), ("cat", 100)):
                image = io.BytesIO()
                Image.new("RGB", (32, 32), (shade,) * 3).save(image, "JPEG")
                archive.writestr(f"{part}/{name}/{shade}.jpg", image.getvalue())
    data = load_data("cifar10")
    assert data.train.images.shape == (3, 32, 32, 3)
    assert data.train.labels.tolist() == [0, 0, 1]
    assert data.test.images[:, 0, 0, 0].tolist() == [0, 100, 200]
