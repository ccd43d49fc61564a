"""Submissions under differential privacy: cost, budget, and that every failure uploads nothing."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from aggregator.ingest.validation import Expectation, check_submission, read_message
from edge_client.agent import events
from edge_client.agent.state import UploadItem
from edge_client.data.images import find_images, held_out
from edge_client.privacy.accountant import NO_ACCOUNTANT
from edge_client.privacy.policy import (
    BOTH,
    BUDGET,
    CANNOT,
    FAILED,
    FILTERS,
    HEAD_REFUSED,
    IN_ROUNDS,
    LARGE_DELTA,
    NO_PROTOTYPE,
    NOT_PRIVATE,
    check_task,
)
from edge_client.service.device import Device
from edge_client.service.worker import Crashed, Worker
from edge_client.storage.device_state import DeviceState
from edge_client.storage.privacy_ledger import LOST
from edge_client.storage.stored_values import BuildProblem, PrivacySpent, SubmissionReport
from edge_client.submission import private_submission
from edge_client.submission.prepared_submission import encode_submission
from protocol.errors import PrivacyRefused, StateError
from protocol.wire import messages
from protocol.wire.codec import decode, encode
from protocol.wire.messages import (
    BlobRef,
    DeviceInfo,
    DifferentialPrivacy,
    Evaluation,
    HeadRef,
    Perturbation,
    Program,
    Submission,
    TaskManifest,
)
from tests.support.device_factory import (
    CLASSES,
    linear_head,
    make_settings,
    tiny,
    write_images,
)
from tests.support.graphs import tiny_backbone
from tests.support.messages import WIRE_TYPES
from tests.unit.edge_client.privacy.test_accountant import closed_form, without_accountant

WANTED = DifferentialPrivacy(clip_norm=2.0, noise_multiplier=2.0, delta=1e-5, max_epsilon=6.0)
ONE = closed_form({2.0: 1}, 1e-5)
TWO = closed_form({2.0: 2}, 1e-5)


class Bench:
    """A device with images on a task with differential privacy; jobs run on the caller's thread."""

    def __init__(
        self, folder: Path, *, count: int = 40, max_epsilon: float | None = None, **task: Any
    ) -> None:
        self.folder = folder
        self.data = write_images(folder / "data", count=count)
        self.max_epsilon = max_epsilon
        self.kept = DeviceState(folder / "state")
        digest = self.kept.blobs.put(tiny_backbone())
        self.manifest = TaskManifest(
            **{
                "fleet": "f",
                "algorithm": "fedtc",
                "classes": CLASSES,
                "backbones": (BlobRef(digest=digest, size_bytes=1, name="tiny"),),
                "alpha": 1.0,
                "batch_size": 10,
                "min_images": 3,
                "seed": 0,
                "differential_privacy": WANTED,
                **task,
            }
        )
        self.start()

    def start(self) -> None:
        """Start the program on the state directory."""
        self.said: list[events.Event | Crashed] = []
        settings = make_settings(self.folder)
        local = replace(settings.local, holdout=0.2, max_epsilon=self.max_epsilon)
        self.settings = replace(settings, local=local)
        self.worker = Worker(self.settings, self.kept, emit=self.said.append, show=None)

    def restart(self) -> None:
        """Start again from the state directory alone."""
        self.kept = DeviceState(self.folder / "state")
        self.start()

    @property
    def task(self) -> bytes:
        """Return the task's digest."""
        return self.kept.blobs.put(encode(self.manifest))

    def build(self) -> events.SubmissionBuilt:
        """Build a submission."""
        self.worker.task = self.task
        self.worker._build(events.BuildSubmission(self.task, self.manifest))
        built = self.said.pop()
        assert isinstance(built, events.SubmissionBuilt)
        return built

    def upload(self) -> Submission:
        """Build a submission, which must succeed, and return it decoded."""
        built = self.build()
        assert built.item is not None, built.reason
        return self.read(built.item)

    def read(self, item: UploadItem) -> Submission:
        """Return the submission in the outbox."""
        (payload,) = self.kept.outbox.read(item.digest, ((0, item.size_bytes),)) or (b"",)
        message = read_message(payload)
        assert isinstance(message, Submission)
        return message

    def refused(self) -> str:
        """Return why no submission is built; the outbox stays as it is."""
        before = self.kept.outbox.items()
        built = self.build()
        assert built.item is None
        assert built.may_pass, "the program goes on, and takes heads"
        assert self.kept.outbox.items() == before
        return built.reason

    def add_images(self, *, seed: int) -> None:
        """Add images to the data folder."""
        write_images(self.data / f"more-{seed}", count=0)
        more = write_images(self.folder / f"more-{seed}", count=3, seed=seed)
        for image in more.rglob("*.png"):
            image.rename(self.data / image.parent.name / f"{seed}-{image.name}")
        for name in CLASSES:
            (self.data / f"more-{seed}" / name).rmdir()
        (self.data / f"more-{seed}").rmdir()

    def info(self) -> DeviceInfo:
        """Return the device's info."""
        device = Device(self.settings, self.kept)
        device._state = replace(device._state, task=self.task, manifest=self.manifest)
        device._problem = self.kept.get(BuildProblem).text
        return device._info()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Return a bench on an empty directory."""
    return Bench(tmp_path)


def test_a_submission_states_its_cost(bench: Bench) -> None:
    """The accountant agrees with the closed form, and the aggregator accepts it."""
    submission = bench.upload()
    spent = submission.privacy
    assert spent is not None
    assert spent.epsilon == spent.total_epsilon == pytest.approx(ONE, rel=1e-3)
    assert (spent.delta, spent.releases) == (1e-5, 1)
    taken = check_submission(submission, Expectation(bench.task, bench.manifest, 16))
    assert taken.counts.min() >= 3
    assert submission.images == taken.counts.sum()
    assert (submission.omitted_classes, submission.loss, submission.tensors, submission.round) == (
        (),
        None,
        {},
        0,
    )


def test_the_same_images_are_charged_once(bench: Bench) -> None:
    """A rebuild gives the same submission, also after a restart."""
    first = bench.build()
    assert bench.build() == first
    bench.restart()
    assert bench.build() == first
    assert len(bench.kept.ledger.releases()) == 1


def test_a_lost_release_is_built_again_with_the_same_noise(bench: Bench) -> None:
    """A damaged outbox costs nothing."""
    first = bench.upload()
    with bench.kept._database.transaction() as database:
        database.execute("DELETE FROM outbox")
    bench.restart()
    again = bench.upload()
    assert (again.prototypes, again.counts, again.labels) == (first.prototypes, first.counts, first.labels)
    assert again.privacy == first.privacy


@pytest.mark.parametrize("restarts", [False, True])
def test_other_images_are_charged_in_addition(bench: Bench, *, restarts: bool) -> None:
    """They get new noise; earlier releases count across restarts."""
    first = bench.upload()
    bench.add_images(seed=1)
    if restarts:
        bench.restart()
    second = bench.upload()
    assert second.privacy is not None
    assert second.privacy.total_epsilon == pytest.approx(TWO, rel=1e-3)
    assert second.privacy.epsilon == pytest.approx(ONE, rel=1e-3)
    assert second.privacy.releases == 2
    assert second.prototypes != first.prototypes
    assert [release.key is None for release in bench.kept.ledger.releases()] == [True, False]


def test_releases_of_earlier_tasks_count(bench: Bench) -> None:
    """Also with other noise."""
    bench.upload()
    other = msgspec.structs.replace(WANTED, noise_multiplier=3.0)
    bench.manifest = msgspec.structs.replace(bench.manifest, seed=1, differential_privacy=other)
    second = bench.upload()
    assert second.privacy is not None
    assert second.privacy.total_epsilon == pytest.approx(closed_form({2.0: 1, 3.0: 1}, 1e-5), rel=1e-3)
    assert second.privacy.epsilon == pytest.approx(closed_form({3.0: 1}, 1e-5), rel=1e-3)
    assert bench.kept.get(PrivacySpent).releases == 2


@pytest.mark.parametrize(("of_task", "own"), [((ONE + TWO) / 2, None), (50.0, (ONE + TWO) / 2)])
def test_the_budget_of_task_and_device_is_kept(tmp_path: Path, of_task: float, own: float | None) -> None:
    """A second submission is refused with a constant text, and the first one stays."""
    wanted = msgspec.structs.replace(WANTED, max_epsilon=of_task)
    bench = Bench(tmp_path, max_epsilon=own, differential_privacy=wanted)
    first = bench.build()
    bench.add_images(seed=1)
    assert bench.refused() == BUDGET
    assert bench.kept.outbox.newest_submission() == first.item
    assert len(bench.kept.ledger.releases()) == 1
    bench.restart()
    assert bench.refused() == BUDGET


def test_a_charged_release_is_built_after_a_crash(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Power loss between charging and uploading costs nothing more."""

    def ends(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(private_submission, "private_prototypes", ends)
        with pytest.raises(KeyboardInterrupt):
            bench.build()
    assert bench.kept.outbox.items() == ()
    bench.restart()
    assert len(bench.kept.ledger.releases()) == 1
    spent = bench.upload().privacy
    assert spent is not None
    assert spent.releases == 1


def test_a_dry_run_charges_nothing(bench: Bench) -> None:
    """It shows the cost."""
    shown: list[Any] = []
    bench.worker = Worker(
        bench.settings, bench.kept, emit=bench.said.append, show=lambda prepared, _: shown.append(prepared)
    )
    bench.build()
    assert shown[0].privacy.releases == 1
    assert bench.kept.ledger.releases() == ()
    assert bench.kept.get(PrivacySpent) == PrivacySpent()
    assert bench.kept.outbox.items() == ()


def _forget(bench: Bench, *statements: str) -> None:
    """Run statements in the device's database."""
    with bench.kept._database.transaction() as connection:
        for statement in statements:
            connection.execute(statement)


def _lose_database(bench: Bench) -> None:
    for file in (bench.folder / "state").glob("device.sqlite*"):
        file.unlink()


def _fails(error: Exception) -> Callable[..., Any]:
    """Return a function that raises an error."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def _not_a_number(names: Sequence[str], *_: object, **__: object) -> NDArray[np.float32]:
    return np.full((len(names), 16), np.nan, np.float32)


FULL = "CREATE TRIGGER full BEFORE INSERT ON releases BEGIN SELECT RAISE(ABORT, 'disk full'); END"

Break = Callable[[Bench, pytest.MonkeyPatch], object]
FAILURES: dict[str, tuple[str, Break]] = {
    "no accountant": (NO_ACCOUNTANT, lambda _, patch: without_accountant(patch)),
    "the accountant fails": (
        FAILED,
        lambda _, patch: patch.setattr(
            private_submission, "epsilon_of", _fails(ArithmeticError("too small"))
        ),
    ),
    "the record cannot be written": (FAILED, lambda bench, _: _forget(bench, FULL)),
    "the marker cannot be written": (FAILED, lambda bench, _: (bench.folder / "state" / "releases").mkdir()),
    "the record cannot be read": (FAILED, lambda bench, _: _forget(bench, "DROP TABLE releases")),
    "a feature is not finite": (
        "a feature is not finite: nothing is uploaded",
        lambda bench, patch: patch.setattr(bench.worker._builder._workspace.cache, "matrix", _not_a_number),
    ),
    "features are gone": (
        FAILED,
        lambda bench, patch: patch.setattr(
            bench.worker._builder._workspace.cache, "matrix", _fails(StateError("secret.png"))
        ),
    ),
    "clipping fails": (
        FAILED,
        lambda _, patch: patch.setattr(
            private_submission, "private_prototypes", _fails(FloatingPointError("secret"))
        ),
    ),
    "no randomness": (FAILED, lambda _, patch: patch.setattr(os, "urandom", _fails(NotImplementedError()))),
    "no secret": (FAILED, lambda bench, patch: patch.setattr(bench.kept, "secret", lambda **_: b"")),
    "out of memory": (
        FAILED,
        lambda _, patch: patch.setattr(private_submission, "private_prototypes", _fails(MemoryError())),
    ),
}
"""What may go wrong on the way to a submission, the reason that is told then, and how it is brought about."""


@pytest.mark.parametrize("what", FAILURES)
def test_any_failure_uploads_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The problem names no image, and the program continues."""
    reason, bring_about = FAILURES[what]
    with monkeypatch.context() as patched:
        bring_about(bench, patched)
        assert bench.refused() == reason
    bench.kept.set(BuildProblem(reason))
    assert "secret" not in bench.info().problem
    assert bench.info().problem


def test_an_infinite_epsilon_exceeds_the_budget(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accountant may give no bound."""
    monkeypatch.setattr(private_submission, "epsilon_of", lambda *_, **__: math.inf)
    assert bench.refused() == BUDGET


LOSSES: dict[str, Callable[[Bench], object]] = {
    "all rows": lambda bench: _forget(bench, "DELETE FROM releases"),
    "the last row": lambda bench: _forget(bench, "DELETE FROM releases WHERE number = 2"),
    "a row in between": lambda bench: _forget(bench, "DELETE FROM releases WHERE number = 1"),
    "rows and facts": lambda bench: _forget(bench, "DELETE FROM releases", "DELETE FROM facts"),
    "no noise": lambda bench: _forget(bench, "UPDATE releases SET noise_multiplier = 0 WHERE number = 1"),
    "the whole database": _lose_database,
    "the marker": lambda bench: (bench.folder / "state" / "releases").unlink(),
    "a damaged marker": lambda bench: (bench.folder / "state" / "releases").write_bytes(b"\0\0"),
}


@pytest.mark.parametrize("lost", LOSSES)
def test_a_lost_ledger_refuses_every_release(bench: Bench, lost: str) -> None:
    """The remaining budget is unknown then."""
    bench.upload()
    bench.add_images(seed=1)
    bench.upload()
    bench.add_images(seed=2)
    LOSSES[lost](bench)
    bench.restart()
    bench.kept.blobs.put(tiny_backbone())
    assert bench.refused() == LOST


def test_the_marker_may_be_one_behind_the_ledger(bench: Bench) -> None:
    """Power loss between the two writes is no damage."""
    bench.upload()
    bench.add_images(seed=1)
    bench.upload()
    (bench.folder / "state" / "releases").write_bytes(b"1\n")
    bench.restart()
    assert len(bench.kept.ledger.releases()) == 2
    bench.upload()


def test_a_device_without_images_releases_noise(tmp_path: Path) -> None:
    """Having no image is private, too."""
    loud = msgspec.structs.replace(WANTED, noise_multiplier=40.0)
    bench = Bench(tmp_path, count=0, batch_size=3, differential_privacy=loud)
    reasons = set()
    for seed in range(12):
        bench.manifest = msgspec.structs.replace(bench.manifest, seed=seed)
        built = bench.build()
        reasons.add(built.reason)
        if built.item is not None:
            assert bench.read(built.item).images >= 3
    assert reasons <= {"", NO_PROTOTYPE}
    assert "" in reasons
    assert len(bench.kept.ledger.releases()) == 12, "nothing was paid for as well"


def test_noise_is_not_redrawn_until_it_leaves_a_prototype(tmp_path: Path) -> None:
    """With too few images, a rebuild is the same release."""
    bench = Bench(tmp_path, count=3, batch_size=200)
    assert [bench.refused(), bench.refused()] == [NO_PROTOTYPE, NO_PROTOTYPE]
    bench.restart()
    assert bench.refused() == NO_PROTOTYPE
    assert len(bench.kept.ledger.releases()) == 1


PROGRAM = Program(
    **{
        role: BlobRef(digest=bytes(32), size_bytes=1, name=role)
        for role in ("init", "step", "project", "head")
    },
    persistent=(),
    uploaded=(),
    batch_size=1,
)
NOISE = Perturbation(on="prototypes", noise="gaussian", scale=1.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"program": PROGRAM}, IN_ROUNDS),
        ({"perturbation": NOISE}, BOTH),
        ({"alpha": 0.99}, FILTERS),
        ({"differential_privacy": msgspec.structs.replace(WANTED, delta=0.5)}, LARGE_DELTA),
        ({"differential_privacy": msgspec.structs.replace(WANTED, noise_multiplier=0.3)}, BUDGET),
    ],
)
def test_a_task_without_a_valid_guarantee_is_refused(
    bench: Bench, changes: dict[str, Any], reason: str
) -> None:
    """The device checks it, whatever the aggregator does."""
    bench.manifest = msgspec.structs.replace(bench.manifest, **changes)
    assert bench.refused() == reason


def test_max_epsilon_refuses_tasks_without_differential_privacy(tmp_path: Path) -> None:
    """Their epsilon is infinite."""
    bench = Bench(tmp_path, max_epsilon=5.0, differential_privacy=None)
    assert bench.refused() == NOT_PRIVATE
    check_task(bench.manifest)


def test_prototypes_without_noise_are_not_encoded_for_a_private_task(bench: Bench) -> None:
    """A last check before bytes leave."""
    bench.upload()
    shown: list[Any] = []
    plain = msgspec.structs.replace(bench.manifest, differential_privacy=None)
    worker = Worker(
        bench.settings, bench.kept, emit=bench.said.append, show=lambda made, _: shown.append(made)
    )
    worker.task = bench.task
    worker._build(events.BuildSubmission(bench.task, plain))
    assert shown
    with pytest.raises(PrivacyRefused):
        encode_submission(shown[0], task=bench.task, manifest=bench.manifest, sequence=1)


# What leaves under differential privacy, field by field.

DECISIONS: dict[type[Any], dict[str, str]] = {
    messages.Presence: {"v": "constant", "state": "no image", "epoch": "time of the start"},
    DeviceInfo: {
        "v": "constant",
        "epoch": "time of the start",
        "software": "no image",
        "runtime": "no image",
        "backbones": "no image",
        "images": "empty",
        "unusable_images": "zero",
        "problem": "constant words",
        "head_version": "no image",
        "refused_messages": "no image",
    },
    Submission: {
        "v": "constant",
        "task": "no image",
        "sequence": "time of the submission",
        "prototypes": "noisy",
        "labels": "noisy",
        "counts": "noisy",
        "images": "noisy",
        "omitted_classes": "empty",
        "round": "zero",
        "tensors": "empty",
        "loss": "none",
        "privacy": "no image",
    },
    messages.Privacy: dict.fromkeys(["epsilon", "total_epsilon", "delta", "releases"], "no image"),
    Evaluation: {
        "v": "constant",
        "task": "no image",
        "head_version": "no image",
        "correct": "zeros",
        "incorrect": "zeros",
        "previous_correct": "zeros",
        "problem": "constant words",
    },
    messages.Frame: {
        "v": "constant",
        "digest": "of one of the above",
        "size_bytes": "of one of the above",
        "offset": "of one of the above",
        "data": "of one of the above",
        "signature": "of one of the above",
        "key": "no image",
    },
    messages.BlobRequest: {
        "v": "constant",
        "digest": "no image",
        "offset": "no image",
        "length": "no image",
    },
    messages.Tensor: {"dtype": "noisy", "shape": "noisy", "data": "noisy"},
}


@pytest.mark.parametrize("message", DECISIONS, ids=lambda message: message.__name__)
def test_every_uploaded_field_has_a_decision(message: type[Any]) -> None:
    """A new field needs a statement of what it reveals about images."""
    assert DECISIONS[message].keys() == set(message.__struct_fields__)


def test_every_message_of_a_device_has_a_decision() -> None:
    """All other messages are the aggregator's."""
    aggregators = {
        "Signed", "TaskManifest", "RoundManifest", "HeadManifest", "Receipt", "Tensors", "Program", "Perturbation",
        "DifferentialPrivacy", "HeadRef", "BlobRef",
    }  # fmt: skip
    sent = {message.__name__ for message in WIRE_TYPES} - aggregators
    assert sent == {message.__name__ for message in DECISIONS}


def test_info_reveals_nothing_about_images(bench: Bench) -> None:
    """The operator of the device sees counts and unusable files; the aggregator does not."""
    (bench.data / "cat" / "broken.png").write_text("broken")
    bench.upload()
    report = bench.kept.get(SubmissionReport)
    assert report.classes[0].images == 40
    assert len(report.unusable) == 1
    info = bench.info()
    assert (info.images, info.unusable_images, info.problem) == ({}, 0, "")
    bench.kept.set(BuildProblem("/home/anna/images/secret.png: truncated"))
    assert bench.info().problem == CANNOT
    bench.kept.set(BuildProblem(BUDGET))
    assert bench.info().problem == BUDGET


def test_info_reveals_nothing_before_there_is_a_task(bench: Bench) -> None:
    """The task may be private."""
    bench.upload()
    info = Device(bench.settings, bench.kept)._info()
    assert (info.images, info.unusable_images) == ({}, 0)


@pytest.mark.parametrize("works", [True, False])
def test_a_private_evaluation_counts_no_image(bench: Bench, *, works: bool) -> None:
    """It states only whether the head runs."""
    bench.upload()
    images = find_images(bench.data, CLASSES)
    assert any(held_out(image, 0.2) for image in images)
    weights = np.ones((16, 2), dtype=np.float32)
    file = linear_head([tiny(bench.folder)], weights, softmax=works)
    digest = bench.kept.blobs.put(file)
    head = HeadRef(
        version=1, head=BlobRef(digest=digest, size_bytes=len(file), name="h"), devices=1, prototypes=1
    )
    bench.worker.install(events.InstallHead(bench.task, bench.manifest, head))
    job = bench.worker._jobs.get()
    assert job is not None
    job()
    installed = bench.said.pop()
    assert isinstance(installed, events.HeadInstalled)
    report = installed.report
    (payload,) = bench.kept.outbox.read(report.digest, ((0, report.size_bytes),)) or (b"",)
    evaluation = decode(payload, Evaluation, max_bytes=len(payload))
    assert (evaluation.correct, evaluation.incorrect) == ((0, 0), (0, 0))
    assert evaluation.problem == ("" if works else HEAD_REFUSED)
