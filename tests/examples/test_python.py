"""The examples of the Python API run, and say what they promise."""

import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

import protofleet
from examples.python import median_prototypes
from examples.python.camera_folder import classify_new
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
