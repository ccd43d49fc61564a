import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import multivariate_normal
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.algorithms.registry import ALGORITHMS
from benchmarks import fleets
from benchmarks.__main__ import cli
from benchmarks.accuracy.wire import command
from benchmarks.accuracy.wire.command import front
from benchmarks.accuracy.wire.methods import Fleet, Point
from benchmarks.accuracy.wire.sums import HEADS, sums_of
from protofleet.simulation.fleet import Features
from tests.benchmarks.feature_factory import domain, fill_cache, normalized, report_of

STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "wire.json"
LINEAR, BYTES = "FedAvg of a linear head", "FedTC, batches"


def _wire(file: Path, *arguments: str) -> dict[str, Any]:
    return report_of(cli, file, "accuracy", "wire", *arguments)


def test_bytes_are_those_of_encoded_messages_and_stored_runs_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plot has all methods, also those of an earlier file."""
    fill_cache(tmp_path, monkeypatch, {"fashion_mnist": domain(0, classes=10, images=2400)})
    linear = dataclasses.replace(RECIPES["default"], adapter=False)
    monkeypatch.setattr(
        Fleet,
        "settings",
        lambda _, *, batch, prototypes="batches": fleets.Settings(
            batch_size=batch, prototypes=prototypes, recipe=linear
        ),
    )
    file = tmp_path / "wire.json"
    first = _wire(file, "--seed", "0", "--method", LINEAR)
    assert [run["uploads"] for run in first["runs"]] == [1, 3, 10, 30, 100]
    each = 10 * 2 * (12 + 1) * 10
    assert [run["bytes_up"] for run in first["runs"]] == [each * rounds for rounds in (1, 3, 10, 30, 100)]

    report = _wire(
        *(file, "--seed", "0", "--resume", str(file)),
        *(f"--method={name}" for name in (LINEAR, BYTES, "FedTC", "all features")),
    )

    assert report["runs"][:5] == first["runs"]
    sizes = {(run["method"], run["setting"]): run["bytes_up"] for run in report["runs"]}
    assert 2400 * 12 / 5 < sizes[BYTES, "B 5"] < 2400 * 12
    assert sizes["FedTC", "auto"] < sizes[BYTES, "B 5"]
    assert sizes["all features", ""] == 2400 * 12 * 4
    assert set(report["plots"][0]["series"]) == {LINEAR, BYTES, "FedTC", "all features"}
    rows = report["tables"][0]["rows"]
    assert len(rows) == len(report["runs"])
    assert [float(row[-1]) for row in rows] == sorted(float(row[-1]) for row in rows)
    assert rows[0][-2] == "*"


def test_rivals_send_what_their_papers_do_of_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed sums, and moments before the rounds."""
    layers: list[str] = []

    def load(_data: str, *, backbone: str, **_: Any) -> Features:
        layers.append(backbone.partition(":")[2])
        made = normalized(domain(0, classes=10, images=1200))
        return dataclasses.replace(made, normalized=":" in backbone)

    fill_cache(tmp_path, monkeypatch, {})
    monkeypatch.setattr(command, "load_features", load)
    rivals = [f"{method}, residual" for method in HEADS]
    chosen = ["FedAvg, momentum", "AFL", *rivals, "statistics, sums, c384 + c576"]
    options = [f"--method={name}" for name in chosen]
    runs = _wire(tmp_path / "wire.json", "--seed", "0", *options)["runs"]
    assert set(layers) == {"", "residual", "c384,c576"}
    of = {(run["method"], run["setting"]): run for run in runs}
    each, moments = 10 * 2 * (12 + 1) * 10, 10 * 2 * 12 * 4
    rounds = [of["FedAvg, momentum", f"{number} rounds"] for number in (3, 10, 30)]
    assert [run["bytes_up"] for run in rounds] == [moments + each * number for number in (3, 10, 30)]
    sums = of["statistics, sums, c384 + c576", "B 1, 12"]["bytes_up"]
    sent = {run["bytes_up"] for run in runs if run["method"] in rivals}
    assert len(sent) == 1
    assert 0.7 * sums < sent.pop() < 1.3 * sums
    assert all((name, "12") in of for name in rivals)
    for run in runs:
        assert run["accuracy"] > 0.8 or "rounds" in run["setting"], run


def test_heads_of_sums_are_those_of_the_rows() -> None:
    """Sums of devices of any classes give the head that all rows in one place give."""
    data = domain(0, classes=4, images=400)
    labels, rows = data.train_labels, data.train.astype(np.float64)
    sums, centered = sums_of(rows, labels), rows - rows.mean(axis=0)
    means = np.array([rows[labels == label].mean(axis=0) for label in range(4)])
    scores = {
        "AFL": data.test @ np.linalg.lstsq(rows, np.eye(4)[labels], rcond=None)[0],
        "FedCGS": np.stack(
            [multivariate_normal(mean, centered.T @ centered / 399).logpdf(data.test) for mean in means],
            axis=1,
        ),
        "GH-LDA": LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.05)
        .fit(rows, labels)
        .decision_function(data.test),
    }
    for method, (head, published) in HEADS.items():
        weight, bias = head(sums, published)
        assert ((data.test @ weight + bias).argmax(axis=1) == scores[method].argmax(axis=1)).all(), method


def test_the_front_is_what_nothing_smaller_reaches() -> None:
    points = [
        Point(setting="", accuracy=accuracy, bytes_up=number)
        for number, accuracy in enumerate((0.5, 0.4, 0.5, 0.6))
    ]
    assert front(points) == [True, False, False, True]


def test_the_stored_plot_has_every_algorithm() -> None:
    series = json.loads(STORED.read_text())["plots"][0]["series"]
    named = {name.partition(",")[0].lower() for name in series}
    assert ALGORITHMS.keys() - {"fedncm"} <= named  # that one uploads what FedTC uploads
