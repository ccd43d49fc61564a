"""Statistics of a device: what is uploaded, how it adds up over devices, and what is refused."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from aggregator.intake.validation import read_message
from edge_client.cli import cli
from edge_client.cli.run import _show_dry_run
from edge_client.kinds.image_features import Workspace, training_feature_keys
from edge_client.kinds.prepared_submission import (
    PreparedSubmission,
    encode_submission,
)
from edge_client.privacy import policy
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import DeviceName
from edge_client.training.trainer import Diverged
from protocol.errors import GraphRefused, PrivacyRefused
from protocol.statistics.second_moment import decode, from_triangle
from protocol.wire.arrays import to_array
from protocol.wire.messages import Perturbation, Statistics, Submission, TaskManifest
from tests.support.devices.device_factory import (
    PROGRAM,
    TINY,
    make_manifest,
    make_submission,
    make_workspace,
    write_images,
)
from tests.support.devices.round_factory import stored
from tests.support.devices.worker_benches import PrivateBench
from tests.support.graphs.step_graphs import NEGATED, map_graph, mapped

TASK = b"t" * 32
SINGLE = {"batch_size": 1, "min_images": 1, "algorithm": "statistics"}


def task_of(workspace: Workspace, graph: bytes, *, size: int = 32, **changes: Any) -> TaskManifest:
    reference = stored(workspace.store.blobs, graph, "map.onnx")
    return make_manifest(**{**SINGLE, **changes}, statistics=Statistics(map=reference, size=size))


def prepare(
    folder: Path, *, graph: bytes | None = None, **changes: Any
) -> tuple[PreparedSubmission, Workspace, TaskManifest]:
    workspace = make_workspace(folder)
    task = task_of(workspace, graph or map_graph(), **changes)
    found = workspace.extract(task)
    assert task.statistics is not None
    return make_submission(workspace, task, found), workspace, task


def uploaded(prepared: PreparedSubmission, task: TaskManifest) -> Submission:
    message = read_message(encode_submission(prepared, task=TASK, manifest=task, sequence=1))
    assert isinstance(message, Submission)
    return message


def statistics_of(message: Submission) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
    """Counts (2,), class sums (2, D) and second moment (D, D) that a submission of single images has."""
    counts, sums = to_array(message.counts), to_array(message.prototypes)
    triangle = decode(message.tensors["second_moment"], counts, sums)
    assert to_array(message.labels).tolist() == [0, 1]
    return counts.astype(np.int64), sums, from_triangle(triangle, sums.shape[1])


def test_sums_of_single_images_are_exact(tmp_path: Path) -> None:
    """Against the features in the cache, by integer arithmetic."""
    write_images(tmp_path / "data", count=9)
    prepared, workspace, task = prepare(tmp_path)
    message = uploaded(prepared, task)
    assert (message.prototypes.dtype, message.counts.dtype, message.images) == ("i4", "u1", 18)
    counts, sums, moment = statistics_of(message)
    found = workspace.extract(task)
    rows = [
        mapped(workspace.features(found.of_class(label), training_feature_keys(task), 16)) for label in (0, 1)
    ]
    assert counts.tolist() == [9, 9]
    np.testing.assert_array_equal(sums, [part.sum(axis=0) for part in rows])
    np.testing.assert_array_equal(moment, sum(part.T @ part for part in rows))


def test_groups_are_those_of_prototypes(tmp_path: Path) -> None:
    """A task that averages images gets a row of each group that it would get a prototype of, and no sums."""
    write_images(tmp_path / "data", count=13)
    prepared, workspace, task = prepare(tmp_path, batch_size=5, min_images=2)
    plain = msgspec.structs.replace(task, statistics=None)
    prototypes = make_submission(workspace, plain, workspace.extract(plain))
    message = uploaded(prepared, task)
    assert (message.prototypes.dtype, message.prototypes.shape, message.tensors) == ("i1", (4, 32), {})
    np.testing.assert_array_equal(to_array(message.counts), prototypes.counts)
    np.testing.assert_array_equal(to_array(message.labels), prototypes.labels)
    rows = to_array(message.prototypes).astype(np.int64)
    assert np.abs(rows).max() <= 127
    np.testing.assert_array_equal(rows[:, :16], -rows[:, 16:])
    # The weighted mean of the rows is close to the class's mean: only rounding separates them.
    for label in (0, 1):
        mine, sizes = rows[prepared.labels == label], prepared.counts[prepared.labels == label]
        mean = 8 * np.average(prototypes.prototypes[prototypes.labels == label].astype(float), 0, sizes)
        np.testing.assert_allclose(np.average(mine, 0, np.sqrt(sizes))[:16], mean, atol=3)


def test_task_that_asks_for_several_images_gets_no_sums_of_single_ones(tmp_path: Path) -> None:
    """Even if its batches have one image, which the aggregator's task file refuses."""
    write_images(tmp_path / "data", count=8)
    prepared, _, _ = prepare(tmp_path, min_images=4)
    assert prepared.form == "group"
    assert prepared.counts.min() >= 4


NAN = (
    NEGATED.replace("projection = Concat<axis = 1>(clipped, negated)", "")
    + """
    zero = Sub(clipped, clipped)
    nan = Div(zero, zero)
    projection = Concat<axis = 1>(nan, nan)
"""
)
HALF = NEGATED.replace("Round(scaled)", "Identity(scaled)")
WIDE = NEGATED.replace("127.0", "1000000.0").replace("8.0", "1024.0")
REFUSED: list[tuple[str, bytes, dict[str, Any]]] = [
    ("expected integers from -127 to 127", map_graph(HALF), {}),
    ("expected integers from -127 to 127", map_graph(WIDE), {}),
    ("expected a map of 16 features to 31 values, map.onnx is one of 16 to 32", map_graph(), {"size": 31}),
    (
        "expected a map of 16 features to 24 values, map.onnx is one of 12 to 24",
        map_graph(feature_size=12, size=24),
        {"size": 24},
    ),
    ("must be float32", map_graph(declared=(16, 31)), {"size": 31}),
    ("expected an ONNX file", b"no graph", {}),
    ("not finite", map_graph(NAN), {}),
]


@pytest.mark.parametrize(("text", "graph", "changes"), REFUSED)
def test_map_that_does_not_fit_is_refused(
    tmp_path: Path, text: str, graph: bytes, changes: dict[str, Any]
) -> None:
    write_images(tmp_path / "data", count=3)
    with pytest.raises((GraphRefused, Diverged), match=text):
        prepare(tmp_path, graph=graph, **changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"program": PROGRAM}, policy.STATISTICS_IN_ROUNDS),
        ({"perturbation": Perturbation(on="prototypes", scale=0.1)}, policy.NOISY_STATISTICS),
        ({"alpha": 0.99}, policy.FILTERED_STATISTICS),
    ],
)
def test_task_whose_privacy_cannot_be_honored_is_refused(changes: dict[str, Any], problem: str) -> None:
    task = make_manifest(**SINGLE, statistics=Statistics(map=TINY, size=4))
    policy.check_task(task)
    policy.check_task(msgspec.structs.replace(task, perturbation=Perturbation(on="images", scale=0.1)))
    with pytest.raises(PrivacyRefused, match=problem):
        policy.check_task(msgspec.structs.replace(task, **changes))


class _Bench(PrivateBench):
    """A device on a task with statistics."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        super().__init__(folder, count=6, **{**SINGLE, "differential_privacy": None, **changes})
        reference = stored(self.store.blobs, map_graph(), "map.onnx")
        self.manifest = msgspec.structs.replace(self.manifest, statistics=Statistics(map=reference, size=32))


def test_status_and_dry_run_show_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning is shown if the images are fewer than a feature's values."""
    bench = _Bench(tmp_path)
    warning = "the sums of 10 images reveal features of single ones, as a feature has 32 values"
    _show_dry_run(msgspec.structs.replace(bench.dry_run(bench.manifest), size_bytes=1234))
    shown = capsys.readouterr().out
    assert "cat: 6 images, 1 held out; 1 class sum of 5 images\n" in shown
    assert "second moment: " in shown
    assert "2 class sums of 32 values each: 1234 bytes would be uploaded" in shown
    assert warning in shown
    bench.upload()
    bench.store.set(DeviceName("shed-1"))
    output = CliRunner().invoke(cli, ["status", "--state", str(tmp_path / "state")]).output
    assert "class      cat: 6 images, 1 held out, 1 class sum\n" in output
    assert f"warning    {warning}" in output


def test_status_and_dry_run_show_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = _Bench(tmp_path, batch_size=2, min_images=2)
    _show_dry_run(msgspec.structs.replace(bench.dry_run(bench.manifest), size_bytes=1234))
    shown = capsys.readouterr().out
    assert "cat: 6 images, 1 held out; 2 groups of 2 to 3 images\n" in shown
    assert "4 groups of 32 values each: 1234 bytes would be uploaded" in shown
    assert bench.upload().prototypes.dtype == "i1"
    DeviceState(tmp_path / "state").set(DeviceName("shed-1"))
    output = CliRunner().invoke(cli, ["status", "--state", str(tmp_path / "state")]).output
    assert "class      cat: 6 images, 1 held out, 2 groups\n" in output
    assert "warning" not in output
