"""The examples of the Python API, and the script that made the demo's backbone, run as promised."""

import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import protofleet
from edge_client.graphs.backbone import open_backbone
from examples.python import median_prototypes
from examples.python.camera_folder import classify_new
from examples.quickstart import train_backbone
from examples.quickstart.distort import EDGE, distort
from examples.quickstart.train_backbone import Images, accuracy, cli, load_fashion, train, write
from protocol.cli import run
from protocol.errors import ConfigError
from tests.support.fleets.fleet import write_digits
from tests.support.graphs.backbones import tiny_backbone

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


def percentages(line: str) -> list[float]:
    return [float(each) for each in re.findall(r"([\d.]+)%", line)]


def test_fedtc_on_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "fedtc_arrays.py"))
    (accuracy,) = percentages(capsys.readouterr().out)
    assert accuracy > 85


def test_simulation_of_100_devices_draws_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fleet is above each device alone, most where devices differ most."""
    file = tmp_path / "simulation.png"
    monkeypatch.setattr(sys, "argv", ["simulate_100_devices.py", str(file)])
    runpy.run_path(str(EXAMPLES / "simulate_100_devices.py"))
    fleet, alone = map(percentages, capsys.readouterr().out.splitlines())
    assert min(fleet) > 70
    assert all(one < every for one, every in zip(alone, fleet, strict=True))
    assert fleet[0] - alone[0] > fleet[-1] - alone[-1]
    assert file.read_bytes().startswith(b"\x89PNG")


def test_camera_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each new image is classified once; a broken one is left out, and does not end the robot."""
    photos = write_digits(tmp_path / "photos", classes=[0, 1], each=20)
    (tmp_path / "backbone.onnx").write_bytes(tiny_backbone())
    data = protofleet.load_dataset(photos, tmp_path / "backbone.onnx")
    part = protofleet.batch_prototypes(data.features, data.labels)
    protofleet.train_head([part], classes=data.classes).save(
        tmp_path / "model.onnx", tmp_path / "backbone.onnx"
    )
    model = protofleet.Model.load(tmp_path / "model.onnx")
    camera, seen = tmp_path / "camera", set[Path]()
    camera.mkdir()
    first, second = (min((photos / name).iterdir()) for name in "01")
    shutil.copy(first, camera / "1.png")
    assert [label for _, label in classify_new(model, camera, seen)] == ["0"]
    shutil.copy(second, camera / "2.png")
    broken = camera / "3.png"
    broken.write_bytes(b"half an image")
    assert [(path.name, label) for path, label in classify_new(model, camera, seen)] == [("2.png", "1")]
    assert broken not in seen, "it may still be written"
    os.utime(broken, (0, 0))
    assert classify_new(model, camera, seen) == []
    assert broken in seen
    assert "left out" in capsys.readouterr().out


def test_algorithm_in_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    """It is simulated without being registered."""
    median_prototypes.main()
    mine, _ = capsys.readouterr().out.splitlines()
    assert mine.startswith("medianproto: ")
    assert percentages(mine)[0] > 60


@pytest.fixture
def stripes(monkeypatch: pytest.MonkeyPatch) -> Images:
    """Two batches of images, which are smaller than the demo's."""
    monkeypatch.setattr(train_backbone, "BATCH_SIZE", 64)
    labels = torch.arange(128) % 2
    lying = (torch.arange(28) // 4 % 2 * 255).to(torch.uint8).expand(28, 28)
    images = torch.where(labels[:, None, None] == 1, lying, lying.T.contiguous())
    return Images(images, labels)


def test_distortion_is_reproducible_and_copies() -> None:
    """Equal generators distort equally, others otherwise; what comes out is an image of the network's size."""
    images = torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    before = images.clone()
    first, again, other = (distort(images, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert first.shape == (64, 1, EDGE, EDGE)
    assert first.min() >= 0
    assert first.max() <= 1
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(images, before)


def test_each_image_is_distorted_in_its_own_way() -> None:
    image = torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    distorted = distort(image.expand(8, 1, 28, 28), torch.Generator().manual_seed(0))
    distances = torch.pdist(distorted.flatten(1))
    assert distances.min() > 0


def test_training_distinguishes_classes(stripes: Images) -> None:
    losses: list[float] = []
    trained = train(stripes, epochs=12, seed=0, on_epoch=lambda _, loss: losses.append(loss))
    assert losses[-1] < losses[0]
    assert accuracy(*trained, stripes) > 0.9


def test_training_is_reproducible(stripes: Images, tmp_path: Path) -> None:
    """Two trainings with one seed give the same weights, in a file that a device can load."""
    first, again = (
        train(stripes, epochs=1, seed=0, on_epoch=lambda _epoch, _loss: None)[0] for _ in range(2)
    )
    assert all(
        torch.equal(one, other) for one, other in zip(first.parameters(), again.parameters(), strict=True)
    )
    backbone = open_backbone(write(first, tmp_path / "net.onnx").path, provider="cpu")
    assert backbone.features(np.zeros((3, EDGE, EDGE, 3), np.uint8)).shape == (3, 256)


def test_fashion_mnist_is_read_from_npz(tmp_path: Path) -> None:
    """Both parts are read, with labels as torch needs them."""
    images = np.zeros((5, 28, 28), np.uint8)
    labels = np.arange(5, dtype=np.uint8)
    np.savez(tmp_path / "f.npz", x_train=images, y_train=labels, x_test=images[:2], y_test=labels[:2])
    train_part, test_part = load_fashion(tmp_path / "f.npz")
    assert (len(train_part.labels), len(test_part.labels)) == (5, 2)
    assert train_part.labels.dtype == torch.int64
    np.savez(tmp_path / "other.npz", x_train=images, y_train=labels, x_test=images[:2])
    with pytest.raises(ConfigError, match="x_train, y_train, x_test and y_test"):
        load_fashion(tmp_path / "other.npz")


def test_absent_data_is_one_error_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Fashion-MNIST the script ends with one line and writes nothing."""
    arguments = ["--data", str(tmp_path / "absent.npz"), "--out", str(tmp_path / "out.onnx")]
    monkeypatch.setattr("sys.argv", ["train_backbone", *arguments])
    with pytest.raises(SystemExit) as ended:
        run(cli, program="train_backbone")
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: cannot read Fashion-MNIST from {tmp_path / 'absent.npz'}")
    assert not (tmp_path / "out.onnx").exists()
