"""The examples of a cluster and of the Python API run, and say what they promise."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import protofleet
from examples.cluster import __main__ as program
from examples.cluster.cluster import Cluster
from examples.cluster.experiment import Head, problems
from examples.python import median_prototypes
from examples.python.camera_folder import classify_new
from examples.quickstart.folder import Folder
from protocol.errors import ConfigError, ProtofleetError
from tests.support.databases.postgresql import needs_postgresql
from tests.support.fleets.fleet import write_digits
from tests.support.graphs.backbones import tiny_backbone
from tests.support.network.brokers import free_address
from tests.support.network.nats import needs_nats


@pytest.mark.timeout(600)
@needs_nats
@needs_postgresql
def test_killed_programs_change_nothing(tmp_path: Path) -> None:
    """The head has the same bytes as that of a single process, and the exit status is 0."""
    command = [sys.executable, "-m", "examples.cluster", "--out", str(tmp_path), "--devices", "5"]
    faults = ["--fault", "coordinator", "--fault", "trainer"]
    done = subprocess.run([*command, *faults], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(?m)^ *\d\d:\d\d:\d\d  (coordinator|trainer)-[12] ", done.stdout) == [
        "coordinator",
        "trainer",
    ]
    assert "5 of 5 submissions in the cluster's head" in done.stdout
    assert done.stdout.endswith("SAME HEAD\n")


HEAD = Head("11", {"a": "aa", "b": "bb"})


@pytest.mark.parametrize(
    ("head", "submitted", "accepted", "expected"),
    [
        (HEAD, HEAD.submissions, "ab", []),
        (HEAD, HEAD.submissions, "abb", ["COUNTED TWICE: b"]),
        (HEAD, {"a": "aa", "b": "b2"}, "ab", ["LOST: b"]),
        (HEAD, {**HEAD.submissions, "c": "cc"}, "abc", ["LOST: c"]),
        (Head("12", HEAD.submissions), HEAD.submissions, "ab", ["OTHER HEAD"]),
    ],
)
def test_verdict_on_a_run(head: Head, submitted: dict[str, str], accepted: str, expected: list[str]) -> None:
    """A submission that was accepted twice, another one than the device's, and another head."""
    assert problems(head, HEAD, submitted=submitted, accepted=Counter(accepted)) == expected


def test_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "nats_program", lambda: None)
    with pytest.raises(ConfigError, match="nats-server is not installed: apt-get install nats-server"):
        program.require_programs()


def test_program_that_ends_by_itself_is_reported(tmp_path: Path) -> None:
    (folder := Folder(tmp_path)).logs.mkdir()
    with (
        Cluster(folder, (free_address(),), services={}, ports=(0, 0)) as cluster,
        pytest.raises(ProtofleetError, match=r"trainer-1 ended with exit status [12]: see .*trainer-1\.log"),
    ):
        cluster.run("trainer-1")  # without a state


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
