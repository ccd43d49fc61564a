import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from aggregator.algorithms.fedtc.adapter import Head as FedtcHead
from benchmarks.data.features import backbone_file, load_features
from benchmarks.fleet.flower import command as flower
from benchmarks.fleet.flower.app.flower_app import task
from benchmarks.fleet.flower.fleets import (
    Meter,
    Outcome,
    Round,
    Setting,
    Traffic,
    Usage,
    _evaluated,
    run_ours,
)
from benchmarks.processes import free_address
from protocol.errors import ConfigError, ProtofleetError
from tests.benchmarks.feature_factory import domain, fill_data, fill_weights, make_folders, pixels_of_digits

FLOWER = os.environ.get("PROTOFLEET_BENCH_FLOWER") or str(Path(shutil.which("flower-superlink") or "").parent)
needs_flower = pytest.mark.skipif(
    not (Path(FLOWER) / "flower-superlink").is_file(),
    reason="flwr is not installed: PROTOFLEET_BENCH_FLOWER names the folder of its programs",
)


def test_flowers_head_is_fedtcs() -> None:
    ours, theirs = FedtcHead(feature_size=12, num_classes=3), task.Head(12, 3)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    features = torch.randn(5, 12)
    assert torch.equal(ours(features), theirs(features))


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_a_client_takes_the_steps_of_pytorchs_optimizer(mu: float) -> None:
    """The proximal term is FedProx's: half of mu times the squared distance from the received head."""
    features, labels = torch.randn(80, 12), torch.arange(80) % 3
    torch.manual_seed(0)
    head, expected = task.Head(12, 3), task.Head(12, 3)
    expected.load_state_dict(head.state_dict())
    received = [each.detach().clone() for each in head.parameters()]
    task.train(head, features, labels, learning_rate=0.1, epochs=2, mu=mu, seed=7)

    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(7)
    for _ in range(2):
        for members in torch.split(torch.randperm(80, generator=generator), task.BATCH):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(expected(features[members]), labels[members])
            distance = sum(((a - b) ** 2).sum() for a, b in zip(expected.parameters(), received, strict=True))
            torch.autograd.backward(loss + mu / 2 * distance)
            optimizer.step()
    for ours, theirs in zip(head.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_rounds_are_counted_until_half_a_point_below_the_own_best() -> None:
    spent = Round(seconds=1.0, bytes_up=0, bytes_down=0, clients_cpu_s=0.0, server_cpu_s=0.0)
    rounds = [replace(spent, accuracy=accuracy) for accuracy in (0.5, 0.896, 0.8, 0.9, 0.7)]
    assert Outcome(rounds, []).needed() == 2


def test_missing_programs_of_flower_are_an_error_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip install flwr"):
        CliRunner().invoke(flower.command, ["--flower", str(tmp_path)], catch_exceptions=False)


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folders(tmp_path, monkeypatch)
    fill_data(tmp_path, train=600, test=200)
    monkeypatch.setattr(
        flower, "BACKBONE", "tf_mobilenetv3_small_100"
    )  # whose arguments a small network takes
    fill_weights(tmp_path, monkeypatch, flower.BACKBONE)


@pytest.mark.usefixtures("digits")
def test_a_fleet_of_real_programs_is_measured(tmp_path: Path) -> None:
    features = load_features("mnist", backbone=flower.BACKBONE, image_size=flower.IMAGE_SIZE)
    backbone = backbone_file(flower.BACKBONE, image_size=flower.IMAGE_SIZE)
    images = pixels_of_digits()[0][:600]
    outcome = run_ours(tmp_path / "ours", backbone, features, images, np.arange(600) % 2)
    prototypes = features.train.shape[1] * 600 / 5
    assert 0.9 * prototypes < outcome.rounds[0].bytes_up < 1.5 * prototypes + 20_000
    assert outcome.rounds[0].accuracy > 0.3
    assert len(outcome.client_memory_bytes) == 2
    assert min(*outcome.client_memory_bytes, outcome.rounds[0].clients_cpu_s) > 0


@needs_flower
@pytest.mark.usefixtures("digits")
def test_flowers_real_programs_are_measured_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower, "CLIENTS", 2)
    monkeypatch.setattr(flower, "SETTINGS", {"FedProx": Setting(learning_rate=0.1, epochs=2, mu=0.01)})
    file = tmp_path / "flower.json"
    options = ["--flower", FLOWER, "--data", "mnist", "--images", "300", "--rounds", "2", "--json", str(file)]
    result = CliRunner().invoke(flower.command, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    theirs = json.loads(file.read_text())["runs"]["FedProx"]
    assert len(theirs["rounds"]) == 2
    assert 0 < theirs["rounds"][0]["seconds"] < theirs["rounds"][1]["seconds"]
    size = load_features("mnist", backbone=flower.BACKBONE, image_size=flower.IMAGE_SIZE).train.shape[1]
    weights = 4 * sum(each.numel() for each in task.Head(size, 10).parameters())
    for direction in ("bytes_up", "bytes_down"):
        assert 2 * 2 * weights < theirs["rounds"][1][direction] < 1.2 * 2 * 2 * weights
    assert min(*theirs["client_memory_bytes"], theirs["rounds"][1]["clients_cpu_s"]) > 0


def test_a_round_of_a_part_of_the_clients_is_an_error(tmp_path: Path) -> None:
    features = domain(0, classes=3, images=30)
    spent = Round(seconds=1.0, bytes_up=0, bytes_down=0, clients_cpu_s=0.0, server_cpu_s=0.0)
    usage = {name: Usage() for name in ("server", "0", "1")}
    meter = Meter(Traffic(free_address()), usage, 0, 0, 0.0)
    state = {name: values.numpy() for name, values in task.Head(12, 3).state_dict().items()}
    for clients in (1, 2):
        np.savez(tmp_path / f"00{clients}.npz", seconds=5.0, clients=clients, **state)
    assert _evaluated(spent, tmp_path / "002.npz", meter, features).seconds == 5.0
    with pytest.raises(ProtofleetError, match="1 of 2 of Flower's clients answered in round 1"):
        _evaluated(spent, tmp_path / "001.npz", meter, features)
