"""Messages under differential privacy: each field of each message, and what it reveals about images."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.core import events
from edge_client.core.state import StoredState
from edge_client.privacy import policy
from edge_client.privacy.policy import BUDGET, HEAD_REFUSED
from edge_client.service.device import Device
from edge_client.store.stored_values import SubmissionReport
from protocol.wire import messages
from protocol.wire.codec import decode, encode
from protocol.wire.messages import BlobRef, DeviceInfo, Evaluation, HeadRef, Privacy, Submission, Tensor
from tests.support.devices.device_factory import TINY, linear_head, payload_of, tiny
from tests.support.devices.job_states import keep_item
from tests.support.devices.worker_benches import PrivateBench, without_privacy
from tests.support.messages.every_type import WIRE_TYPES

DECISIONS: dict[type[Any], dict[str, str]] = {
    messages.Presence: {
        "v": "constant", "state": "no image", "epoch": "time of the start", "instance": "random",
        **dict.fromkeys(["address", "key", "signature"], "no image"),
    },
    DeviceInfo: {
        "v": "constant", "epoch": "time of the start", "software": "no image", "runtime": "no image",
        "backbones": "no image", "images": "empty", "unusable_images": "zero", "problem": "constant words",
        "warning": "no image", "head_version": "no image", "refused_messages": "no image", "drift": "none",
    },
    Submission: {
        "v": "constant", "task": "no image", "sequence": "time of the submission", "prototypes": "noisy",
        "labels": "constant", "counts": "noisy", "images": "noisy", "omitted_classes": "empty", "round": "zero",
        "tensors": "noisy", "loss": "none", "privacy": "no image",
        "mask": "random", "block": "none",
    },
    messages.Block: dict.fromkeys(["means", "labels", "counts", "rows", "diagonal", "scales"], "none"),
    Privacy: dict.fromkeys(["epsilon", "total_epsilon", "delta", "releases"], "no image"),
    Evaluation: {
        "v": "constant", "task": "no image", "head_version": "no image", "correct": "zeros", "incorrect": "zeros",
        "previous_correct": "zeros", "problem": "constant words", "correct_with_prior": "none",
        **dict.fromkeys(["confidence_correct", "confidence_images", "novelty_images", "confused"], "none"),
    },
    messages.SealedMask: {"sealed": "random", **dict.fromkeys(["min_devices", "key", "signature"], "no image")},
    messages.Confused: dict.fromkeys(["label", "predicted", "images"], "none"),
    messages.Frame: {
        "v": "constant", "key": "no image",
        **dict.fromkeys(["digest", "size_bytes", "offset", "data", "signature"], "of one of the above"),
    },
    messages.BlobRequest: {"v": "constant", **dict.fromkeys(["digest", "offset", "length"], "no image")},
    messages.PrivacyRecord: {"v": "constant", **dict.fromkeys(["releases", "key", "signature"], "no image")},
    messages.Released: dict.fromkeys(["noise_multiplier", "honest", "times", "images_per_person"], "no image"),
    messages.Tensor: dict.fromkeys(["dtype", "shape", "data"], "noisy"),
}  # fmt: skip


NOTHING = Tensor("u1", (0,), b"")


@pytest.fixture
def bench(tmp_path: Path) -> PrivateBench:
    """Return a bench on an empty directory."""
    return PrivateBench(tmp_path)


def test_every_uploaded_field_has_a_decision() -> None:
    """A new field or message needs a statement of what it reveals about images."""
    for message, fields in DECISIONS.items():
        assert fields.keys() == set(message.__struct_fields__), message
    aggregators = {
        "Signed", "KeyCertificate", "TaskManifest", "RoundManifest", "HeadManifest", "Receipt", "Tensors", "Program",
        "Statistics", "SecondOperator", "MaskedSubmission", "SumRequest", "SumReply",
        "Perturbation", "DifferentialPrivacy", "HeadRef", "BlobRef",
    }  # fmt: skip
    sent = {message.__name__ for message in WIRE_TYPES} - aggregators
    assert sent == {message.__name__ for message in DECISIONS}


def test_info_reveals_nothing_about_images(bench: PrivateBench) -> None:
    """The operator of the device sees counts and unusable files; the aggregator does not."""
    (bench.data / "cat" / "broken.png").write_text("broken")
    bench.upload()
    report = bench.store.get(SubmissionReport)
    assert report.classes[0].images == 40
    assert len(report.unusable) == 1
    info = bench.info()
    assert (info.images, info.unusable_images, info.problem) == ({}, 0, "")
    bench.store.set(StoredState(problems={"build": "/home/anna/images/secret.png: truncated"}))
    assert bench.info().problem == policy.CANNOT
    bench.store.set(StoredState(problems={"build": BUDGET}))
    assert bench.info().problem == BUDGET


def test_info_after_a_private_release_reveals_nothing_until_the_next_submission(bench: PrivateBench) -> None:
    """A task without privacy would otherwise get the exact numbers of the private one, by its first `info`."""
    (bench.data / "cat" / "broken.png").write_text("broken")
    bench.upload()
    bench.manifest = without_privacy(bench.manifest)
    bench.store.set(StoredState(problems={"build": "/home/anna/images/secret.png: truncated"}))
    for allow in (False, True):
        bench.settings = replace(bench.settings, allow_non_private_tasks=allow)
        bench.restart()
        info = bench.info()
        assert (info.images, info.unusable_images, info.problem) == ({}, 0, policy.CANNOT)
    bench.upload()
    assert bench.info().images == {"cat": 40, "dog": 40}


def test_info_names_the_tasks_backbones_only(bench: PrivateBench) -> None:
    """Another file may be a local model, whose digest tells who has the images of which ones it was made."""
    bench.store.blobs.put(b"a local model of a task before --max-epsilon")
    assert bench.info().backbones == (TINY.digest,)


def test_what_is_no_message_is_deleted_at_a_start_with_max_epsilon(bench: PrivateBench) -> None:
    """A round's graphs can make a loss that no message may have; the aggregator refuses it, and it stays."""
    message = Submission(
        task=bench.task, sequence=1, prototypes=NOTHING, labels=NOTHING, counts=NOTHING, images=1, loss=1e7
    )
    keep_item(bench.store, encode(message), task=bench.task, about="0")
    Device(replace(bench.settings, max_epsilon=1.0), bench.store)
    assert bench.store.outbox.items() == ()


def test_info_reveals_nothing_before_there_is_a_task(bench: PrivateBench) -> None:
    """The task may be private."""
    bench.upload()
    info = Device(bench.settings, bench.store).info()
    assert (info.images, info.unusable_images) == ({}, 0)


def test_info_reveals_nothing_about_a_task_that_max_epsilon_refuses(tmp_path: Path) -> None:
    """An aggregator could send such a task after a private one, for the exact numbers of the private submission."""
    bench = PrivateBench(tmp_path, max_epsilon=50.0)
    (bench.data / "cat" / "broken.png").write_text("broken")
    bench.upload()
    bench.manifest = without_privacy(bench.manifest)
    assert bench.refused() == policy.NOT_PRIVATE
    info = bench.info()
    assert (info.images, info.unusable_images) == ({}, 0)
    bench.store.set(StoredState(problems={"build": "/home/anna/images/secret.png: truncated"}))
    assert bench.info().problem == policy.CANNOT


def test_a_head_of_a_task_that_max_epsilon_refuses_runs_on_no_image(tmp_path: Path) -> None:
    """It is installed; its evaluation says nothing, also of images whose features were computed before."""
    bench = PrivateBench(tmp_path, differential_privacy=None)
    bench.upload()
    bench.settings = replace(bench.settings, max_epsilon=5.0)
    bench.restart()
    assert bench.refused() == policy.NOT_PRIVATE
    evaluation = _evaluation(bench, works=True)
    assert (evaluation.correct, evaluation.incorrect) == ((0, 0), (0, 0))


@pytest.mark.parametrize("works", [True, False])
def test_a_private_evaluation_counts_no_image(bench: PrivateBench, *, works: bool) -> None:
    """It states only whether the head runs."""
    bench.upload()
    evaluation = _evaluation(bench, works=works)
    assert (evaluation.correct, evaluation.incorrect) == ((0, 0), (0, 0))
    assert evaluation.problem == ("" if works else HEAD_REFUSED)


def _evaluation(bench: PrivateBench, *, works: bool) -> Evaluation:
    """Install a head, and return its evaluation."""
    file = linear_head([tiny(bench.folder)], np.ones((16, 2), dtype=np.float32), softmax=works)
    blob = BlobRef(digest=bench.store.blobs.put(file), size_bytes=len(file), name="h")
    head = HeadRef(version=1, head=blob, devices=1, prototypes=1)
    installed = bench.worker.run(events.InstallHead(bench.task, bench.manifest, head))
    assert isinstance(installed, events.HeadInstalled)
    assert installed.report is not None
    payload = payload_of(bench.store, installed.report)
    return decode(payload, Evaluation, max_bytes=len(payload))
