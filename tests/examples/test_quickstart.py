"""The demo: its data, its backbone and its folder, its processes, and a whole run of it through its command line."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from aggregator.config.task_file import load_task
from aggregator.config.training_packages import PACKAGES as TRAINING_PACKAGES
from aggregator.tasks.task_preparation import checked_backbone
from edge_client.graphs.backbone import open_backbone
from edge_client.images.decoding import decode
from edge_client.images.images import find_images
from examples.quickstart import digits as data
from examples.quickstart.__main__ import main
from examples.quickstart.fleet import Fleet, children, peak_memory_bytes
from examples.quickstart.folder import (
    ALGORITHMS,
    BACKBONE,
    ROUNDS,
    Folder,
    device_names,
    prepare,
    task_text,
)
from examples.quickstart.measure import Images, accuracy_on, trained_alone
from examples.quickstart.report import Accuracy, DeviceResult, Result, progress, show
from protocol.errors import ConfigError, ProtofleetError
from protocol.models.preprocessing import preprocess
from protocol.storage.blobstore import file_digest
from tests.support.fleets.aggregator_process import without
from tests.support.fleets.fleet import aggregator_status, wait_until

DIGITS = data.load()


def filled(root: Path, *, devices: int = 5) -> Folder:
    folder = Folder(root)
    deal = data.deal(DIGITS.labels, devices=devices, seed=0)
    prepare(folder, DIGITS, deal, names=device_names(devices), seed=0)
    return folder


@settings(deadline=None, max_examples=30)
@given(devices=st.integers(data.FEWEST_DEVICES, 50), seed=st.integers(0, 2**32))
def test_every_image_is_dealt_once(devices: int, seed: int) -> None:
    """However many devices: each has two classes, every class is somewhere, and no image is in two places."""
    deal = data.deal(DIGITS.labels, devices=devices, seed=seed)
    everything = np.concatenate([*deal.shares, deal.held_out])
    assert sorted(everything) == list(range(len(DIGITS.labels)))
    assert len(deal.shares) == devices
    assert all(len(np.unique(DIGITS.labels[share])) == data.CLASSES_EACH for share in deal.shares)
    assert set(DIGITS.labels[deal.held_out]) == set(range(10))
    assert len(deal.held_out) == pytest.approx(0.2 * len(DIGITS.labels), abs=5)


def test_dealing_is_reproducible() -> None:
    first, again, other = (data.deal(DIGITS.labels, devices=10, seed=seed) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first.shares, again.shares, strict=True))
    assert not np.array_equal(first.held_out, other.held_out)


def test_too_few_devices_are_refused() -> None:
    """Four devices with two classes each cannot cover ten."""
    with pytest.raises(ValueError, match="at least 5 devices"):
        data.deal(DIGITS.labels, devices=4, seed=0)


def test_images_on_disk_are_the_digits(tmp_path: Path) -> None:
    """A device reads from its folder what was dealt to it, pixel for pixel."""
    folder = filled(tmp_path)
    share = data.deal(DIGITS.labels, devices=5, seed=0).shares[2]
    images = find_images(folder.images("device-03"), data.CLASSES)
    assert sorted(int(image.path.stem) for image in images) == list(share)
    for image in images[:5]:
        number = int(image.path.stem)
        assert image.label == DIGITS.labels[number]
        assert np.array_equal(np.asarray(decode(image.path)), DIGITS.images[number])


def test_task_file_is_valid(tmp_path: Path) -> None:
    """The task file waits for every device, and names the algorithm and the backbone beside it."""
    folder = filled(tmp_path, devices=7)
    for algorithm in ALGORITHMS:
        if algorithm != "fedtc":
            folder.task.write_text(task_text(algorithm, devices=7, seed=3), encoding="utf-8")
        task, (backbone,) = load_task(folder.task)
        assert (task.quorum, task.classes, task.algorithm) == (7, data.CLASSES, algorithm)
        assert backbone == tmp_path / BACKBONE.name
        assert task.learning is None or task.learning.rounds == (1 if algorithm == "hierarchical" else ROUNDS)
    assert checked_backbone(backbone).feature_size == 256


def test_earlier_run_is_replaced(tmp_path: Path) -> None:
    """Nothing of an earlier, larger fleet is left in the folder."""
    filled(tmp_path, devices=10)
    (tmp_path / "aggregator").mkdir()
    folder = filled(tmp_path, devices=5)
    assert len(list((tmp_path / "devices").iterdir())) == 5
    assert not folder.aggregator.exists()


def test_foreign_folder_is_refused(tmp_path: Path) -> None:
    """A folder that no demo made is refused, and nothing in it is touched."""
    (tmp_path / "devices").mkdir()
    with pytest.raises(ConfigError, match="choose another --out"):
        filled(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["devices"]


def test_shipped_backbone_matches_its_note() -> None:
    """Small, described by its own digest, and loaded as a device loads it."""
    note = BACKBONE.with_name("BACKBONE.md").read_text(encoding="utf-8")
    assert BACKBONE.stat().st_size <= 3_000_000
    assert file_digest(BACKBONE).hex() in note
    assert f"{BACKBONE.stat().st_size:,} bytes" in note
    backbone = open_backbone(BACKBONE, provider="cpu")
    assert backbone.metadata.parity is not None
    assert backbone.metadata.parity.relative_error < 1e-5
    assert (backbone.metadata.preprocessing.height, backbone.metadata.feature_size) == (32, 256)


def test_shipped_backbone_distinguishes_digits(tmp_path: Path) -> None:
    """The nearest class mean, of 100 digits, names most of another 100: features of noise would name ten."""
    backbone = open_backbone(BACKBONE, provider="cpu")
    data.write_images(tmp_path, DIGITS, np.arange(200))
    paths = sorted(tmp_path.glob("*/*.png"), key=lambda path: path.stem)
    images = np.stack([preprocess(decode(path), backbone.metadata.preprocessing) for path in paths])
    features, labels = backbone.features(images), DIGITS.labels[:200]
    means = np.stack([features[:100][labels[:100] == label].mean(axis=0) for label in range(10)])
    distances = np.linalg.norm(features[100:, None] - means, axis=2)
    assert (distances.argmin(axis=1) == labels[100:]).mean() > 0.85


def start(*arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.quickstart", *map(str, arguments)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run the demo in this process, where it ends with exit status 1."""

    def run(*arguments: str | Path) -> None:
        monkeypatch.setattr("sys.argv", ["quickstart", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1

    return run


def test_failing_device_ends_the_demo(tmp_path: Path) -> None:
    """The message names the device, its last words and its log, and no process is left."""
    folder, before = filled(tmp_path), set(psutil.Process().children(recursive=True))
    shutil.rmtree(folder.images("device-02"))
    with Fleet(folder, timeout_s=300) as fleet:
        fleet.start_aggregator()
        fleet.start_devices(device_names(5)[:2])
        with pytest.raises(ProtofleetError) as raised:
            fleet.wait_for_devices(lambda: None)
    assert "device-02 ended with exit status 1: error:" in str(raised.value)
    assert str(folder.images("device-02")) in str(raised.value)
    assert str(folder.logs / "device-02.log") in str(raised.value)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_timeout_ends_the_demo(tmp_path: Path) -> None:
    """The message names the programs that still ran and the folder of the logs; exit status 1, no stack trace."""
    process = start("--out", tmp_path / "out", "--devices", "5", "--timeout-s", "0.1")
    _, said = process.communicate(timeout=600)
    assert process.returncode == 1
    last = said.splitlines()[-1]
    assert last.startswith("error: not done after 0 s, still running: aggregator")
    assert str(tmp_path / "out" / "logs") in last


def test_interrupt_ends_every_process(tmp_path: Path) -> None:
    """After Ctrl-C in the middle, neither aggregator nor devices run on."""
    process = start("--out", tmp_path / "out", "--devices", "5")
    family = psutil.Process(process.pid)
    deadline = time.monotonic() + 300
    while len(children := family.children(recursive=True)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert len(children) >= 3, said
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "interrupted"
    # One whose parent has ended may be left to an init that collects none.
    assert not [each for each in children if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def test_folder_in_use_is_refused(
    tmp_path: Path, refused: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A second demo in the folder of a running one ends before it touches anything."""
    folder = filled(tmp_path)
    with Fleet(folder, timeout_s=300) as fleet:
        fleet.start_aggregator()
        wait_until(
            "the aggregator",
            lambda: aggregator_status(folder.aggregator).get("running"),
            diagnostics=(folder.logs / "aggregator.log").read_text,
        )
        refused("--out", tmp_path)
    assert capsys.readouterr().err.endswith("end it, or choose another --out\n")
    assert folder.aggregator.exists()


def test_json_file_without_a_folder_is_refused_at_once(
    tmp_path: Path, refused: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo does not start if its result cannot be written."""
    refused("--out", tmp_path / "out", "--json", tmp_path / "nowhere" / "result.json")
    said = f"error: no folder {tmp_path / 'nowhere'} to write result.json in: make it first\n"
    assert capsys.readouterr().err == said
    assert not (tmp_path / "out").exists()


def test_devices_are_compared_on_the_same_images() -> None:
    """A head alone knows its own classes, on which both heads are evaluated, and predicts no others."""
    pixels = (DIGITS.images.reshape(len(DIGITS.labels), -1) / 255).astype(np.float32)
    test = Images(pixels[-300:], DIGITS.labels[-300:])
    threes_and_fours = np.isin(DIGITS.labels[:-300], [3, 4])
    own = Images(pixels[:-300][threes_and_fours], DIGITS.labels[:-300][threes_and_fours])
    share = np.isin(test.labels, [3, 4]).mean()
    alone = accuracy_on(test, trained_alone(own), own.labels)
    assert alone.own > 0.95
    assert alone.all == pytest.approx(alone.own * share)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """A whole run with five devices, without the packages of the extra `train`: its folder, its output and its JSON."""
    root = tmp_path_factory.mktemp("demo")
    (root / "sitecustomize.py").write_text(without(*TRAINING_PACKAGES, "timm"), encoding="utf-8")
    arguments = ("--out", root / "out", "--json", root / "result.json", "--devices", "5")
    process = start(*arguments, env={**os.environ, "PYTHONPATH": str(root)})
    printed, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return root / "out", printed, json.loads((root / "result.json").read_text())


def test_fleet_is_more_accurate_than_a_device_alone(demo: tuple[Path, str, dict[str, Any]]) -> None:
    """The head knows the digits of all devices; a device alone knows two."""
    _, _, result = demo
    assert (result["devices"], result["submissions"]) == (5, 5)
    assert result["fleet"]["all"] >= 0.95
    assert result["fleet"]["own"] >= 0.97
    assert result["alone"]["own"] >= 0.97
    assert 0.1 < result["alone"]["all"] < 0.25
    assert result["fleet"]["all"] >= result["nearest_mean_accuracy"] - 0.01
    assert result["logistic_regression_accuracy"] >= result["nearest_mean_accuracy"] > 0.9
    assert result["onnx_max_difference"] <= 1e-4
    assert result["bytes_up"] == sum(row["bytes_up"] for row in result["per_device"])
    assert result["seconds"] > 0


def test_cost_of_a_device_is_measured(demo: tuple[Path, str, dict[str, Any]]) -> None:
    """CPU time and memory are of a device's service and its job, which imports numpy and ONNX Runtime."""
    _, printed, result = demo
    rows = result["per_device"]
    assert all(row["cpu_s"] > 0.1 for row in rows)
    assert all(70e6 < row["peak_memory_bytes"] < 1e9 for row in rows if row["peak_memory_bytes"])
    assert f"{sum(row['cpu_s'] for row in rows) / len(rows):.1f} s of CPU time" in printed


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_memory_of_a_device_is_not_the_demos() -> None:
    """Linux counts the parent's memory in a child's `ru_maxrss`: the peak is read without it."""
    held = np.ones(400_000_000, dtype=np.uint8)
    child = subprocess.Popen(
        [sys.executable, "-c", "input(print('ready', flush=True))"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    peak = peak_memory_bytes(child.pid)
    assert child.pid in children(os.getpid())
    child.communicate(b"\n")
    assert 1e6 < peak < len(held) / 2
    assert peak_memory_bytes(child.pid) == 0
    assert children(child.pid) == []


def test_fleet_is_measured_as_a_device_predicts(demo: tuple[Path, str, dict[str, Any]]) -> None:
    """`edge-client predict` has the same accuracy by default: on its own digits with the labels' prior."""
    out, _, result = demo
    row = result["per_device"][1]
    everything = [out / "held-out"]
    own = [out / "held-out" / name for name in row["classes"]]
    for folders, share, prior in (
        (own, row["fleet"]["own"], "labels"),
        (everything, row["fleet"]["all"], "none"),
    ):
        command = [sys.executable, "-m", "edge_client.cli", "predict", "--json", "--state"]
        state = out / "devices" / row["device"] / "state"
        done = subprocess.run([*command, state, *folders], capture_output=True, text=True, check=True)
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert {each["prior"] for each in found if each["known"] is not False} == {prior}
        assert np.mean([each["label"] == Path(each["image"]).parent.name for each in found]) == share


def test_output_agrees_with_json(demo: tuple[Path, str, dict[str, Any]]) -> None:
    """The table has every device, and the files that it names are there."""
    out, printed, result = demo
    for row in result["per_device"]:
        assert row["device"] in printed
        assert f"{row['bytes_up']:,}" in printed
    first, head = result["per_device"][0], (result["fleet"], result["alone"])
    assert all(f"{share:.1%}" in printed for accuracy in head for share in accuracy.values())
    assert f"knows ten: {first['fleet']['all']:.1%} ({first['alone']['all']:.1%} alone)." in printed
    assert (
        f"own two digits it has {first['fleet']['own']:.1%} ({first['alone']['own']:.1%} alone)." in printed
    )
    assert (out / "aggregator" / "head.onnx").samefile(result["head"])
    assert str(out / "aggregator" / "model.onnx") in printed
    assert Path(result["model"]).is_file()


def test_printed_commands_work(demo: tuple[Path, str, dict[str, Any]]) -> None:
    """The commands for the next steps, as printed: a device classifies a digit of which it has no image."""
    out, printed, result = demo
    command = next(line.split() for line in printed.splitlines() if "edge-client predict" in line)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    image = Path(command[-1])
    assert image.parent.name not in result["per_device"][0]["classes"]
    assert done.stdout.startswith(f"{image}: ")
    status = next(line.split() for line in printed.splitlines() if "aggregator status" in line)
    done = subprocess.run(status, capture_output=True, text=True, check=True)
    assert "5 submissions" in done.stdout
    assert out.is_dir()


def test_table_fits_80_columns(tmp_path: Path) -> None:
    row = DeviceResult(
        device="device-01", classes=("3", "7"), images=146, prototypes=23, bytes_up=11969,
        cpu_s=2.34, peak_memory_bytes=91_000_000, fleet=Accuracy(1.0, 0.981), alone=Accuracy(0.993, 0.2),
    )  # fmt: skip
    result = Result(
        algorithm="fedtc",
        rounds=0,
        fleet=Accuracy(0.994, 0.982), alone=Accuracy(0.992, 0.199),
        nearest_mean_accuracy=0.961, logistic_regression_accuracy=0.991,
        devices=10, submissions=10, prototypes=230, bytes_up=119690,
        onnx_max_difference=1e-6, seconds=40.0, held_out_images=359, head="/h.onnx", model="/m.onnx",
        per_device=(row,) * 10,
    )  # fmt: skip
    console = Console(width=80, record=True)
    show(result, filled(tmp_path), console)
    printed = console.export_text()
    assert "…" not in printed
    assert re.search(r"device-01 +3 7 +146 +11,969 +100\.0% +99\.3% +98\.1% +20\.0%", printed)
    assert re.search(r"10 devices +1,460 +119,690 +99\.4% +99\.2% +98\.2% +19\.9%", printed)
    assert all(share in printed for share in ("96.1%", "99.1%"))
    assert "device-01 has seen two digits and now knows ten: 98.1% (20.0% alone)." in printed
    assert "On its own two digits it has 100.0% (99.3% alone)." in printed
    assert "12.0 kB uploaded, 2.3 s of CPU time, 91 MB of memory at its peak" in printed
    in_rounds = msgspec.structs.replace(result, algorithm="fpl", rounds=10, onnx_max_difference=None)
    show(in_rounds, Folder(tmp_path), console)
    printed = console.export_text()
    assert "Uploaded in each of 10 rounds: 119.7 kB of averaged projections and changes of" in printed
    assert "12.0 kB uploaded in a round" in printed
    assert all(absent not in printed for absent in ("Maximum", "None", "…"))


ROW = {"device": "device-01", "state": "online", "prototypes": 23, "bytes": 11969, "accuracy": None}


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ({}, ["0 of 2 devices have uploaded", "starting"]),
        ({"devices": [ROW | {"prototypes": 0}], "heads": []}, ["extracting features", "starting"]),
        (
            {"devices": [ROW], "heads": [{}], "round": {"number": 3, "rounds": 10, "over": False}},
            ["round 4 of 10", "uploaded 23 prototypes"],
        ),
        (
            {"devices": [ROW], "heads": [], "training": {"version": 1, "epoch": 7, "epochs": 300}},
            ["epoch 7 of 300", "uploaded 23 prototypes, 12.0 kB"],
        ),
        (
            {"devices": [ROW], "heads": [], "counted": "images"},
            ["uploaded prototypes of 23 images, 12.0 kB"],
        ),
        (
            {
                "devices": [ROW | {"state": "stopped", "accuracy": 1.0, "correct": 29, "incorrect": 0}],
                "heads": [{"version": 1}],
            },
            ["1 of 2 devices have evaluated the head", "(29/29)"],
        ),
    ],
    ids=["nothing", "connected", "round", "training", "blocks", "evaluated"],
)
def test_progress_of_each_step(summary: dict[str, Any], expected: list[str]) -> None:
    console = Console(width=80, record=True)
    console.print(progress(summary, ("device-01", "device-02")))
    printed = console.export_text()
    assert all(words in printed for words in expected), printed


def test_rounds_name_what_they_need(
    tmp_path: Path,
    refused: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The demo's packages are enough for algorithms without rounds."""
    monkeypatch.setitem(sys.modules, "torch", None)
    refused("--out", tmp_path / "out", "--algorithm", "fpl")
    said = "error: algorithm = \"fpl\" needs torch: pip install -e '.[cpu,demo,train]'\n"
    assert capsys.readouterr().err.endswith(said)


def test_missing_packages_are_named(tmp_path: Path) -> None:
    """With only the device's packages, one line names the missing packages and the command that installs them."""
    absent = tmp_path / "sitecustomize.py"
    absent.write_text(
        "import importlib.util as u\n"
        "found = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name in ('onnx', 'rich') else found(name, package)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "examples.quickstart", "--out", tmp_path / "out"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the quickstart needs onnx, rich: ")
    assert len(done.stderr.splitlines()) == 1
