"""`aggregator status`: the collected values and the printed text."""

import contextlib
import dataclasses
import os
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from aggregator.algorithms.fpl import FPL
from aggregator.config.limits import Limits
from aggregator.config.privacy import PrivacyBudget, PrivacySettings
from aggregator.config.schema import Rounds
from aggregator.config.training_packages import INSTALL
from aggregator.coordination.rollout_state import State, Trial
from aggregator.http.metrics import metrics_text
from aggregator.http.snapshots import read_snapshot
from aggregator.status import model
from aggregator.status.collect import collect_status
from aggregator.status.heads import ClassResult, Confusion, DeviceSpread, HeldOut
from aggregator.storage import stop_reason
from aggregator.storage.heads import TrainingProgress
from aggregator.storage.open_store import open_store
from aggregator.storage.quarantine import ForgottenDevice
from aggregator.storage.refusals import Refusal
from aggregator.storage.stop_reason import StopReason
from aggregator.storage.store import Store
from aggregator.storage.usage import FLEET, Usage
from aggregator.sums.stored_lists import put_sums, sums_of
from protocol.statistics.noisy_sums import hidden_images
from protocol.wire.messages import BlobRef, Confused, Evaluation, Released
from tests.support.messages import heads
from tests.support.messages.heads import initial_state, plan_head
from tests.support.messages.submissions import TASK, device_info, evaluation
from tests.unit.aggregator.status.stores import (
    TASK_FILE,
    add_head,
    busy_store,
    collected,
    private_store,
    rendered,
    started_store,
    submission_row,
)


@pytest.fixture
def busy(tmp_path: Path) -> Store:
    return busy_store(tmp_path)


@pytest.fixture
def started(tmp_path: Path) -> Store:
    return started_store(tmp_path)


def test_status_at_first_start(started: Store, tmp_path: Path) -> None:
    """Everything is empty, and a read-only store is enough."""
    status = collected(open_store(tmp_path, read_only=True))
    started.close()
    assert (status.fleet, status.classes, status.quorum) == ("barn", TASK_FILE.classes, 2)
    assert (status.devices, status.heads, status.refusals) == ((), (), ())
    assert (status.submissions, status.waiting, status.closes_at_s) == (0, 0, None)
    assert (status.training, status.round, status.head_path, status.model_path) == (None,) * 4
    assert "without prototypes: cat, dog [/bold], fox" in rendered(status)


def test_limit_of_trainings_is_shown(busy: Store) -> None:
    assert "heads_per_hour" not in rendered(collected(busy))
    for version in range(2, 14):
        add_head(busy, version)
        busy.heads.put(dataclasses.replace(busy.heads.all()[-1], started_s=busy.clock.now_s()))
    status = collected(busy)
    assert status.rate_limited_until_s == busy.clock.now_s() + 300.0
    expected = r"training limited no training before [0-9: -]+ \w+ \(limits.heads_per_hour\)"
    assert re.search(expected, rendered(status))


def test_status_of_busy_aggregator(tmp_path: Path) -> None:
    folder = tmp_path / "[red]state[/red]"
    status = collected(busy_store(folder))
    assert {row.device: (row.state, row.images, row.prototypes) for row in status.devices} == {
        "a": ("online", 50, 10),
        "b": ("unknown", 0, 3),
        "idle": ("offline", 0, 0),
    }
    assert status.devices[0].accuracy == 0.9
    by_class = status.devices[0].images_by_class, status.devices[0].prototypes_by_class
    assert by_class == ({"cat": 30, "fox": 20}, {"cat": 6, "fox": 4})
    assert status.coverage == {
        "cat": model.Coverage(prototypes=9, devices=2),
        "dog [/bold]": model.Coverage(prototypes=0, devices=0),
        "fox": model.Coverage(prototypes=4, devices=1),
    }
    assert (status.submissions, status.waiting, status.closes_at_s) == (2, 1, 260.0)
    (head,) = status.heads
    assert (head.version, head.devices, head.prototypes, len(head.sha256)) == (1, 1, 10, 64)
    assert head.held_out == HeldOut(
        correct=9,
        incorrect=1,
        accuracy=0.9,
        balanced=0.8,
        devices=1,
        spread=DeviceSpread(mean=0.9, worst=0.9, best=0.9, devices=1),
        by_class={
            "cat": ClassResult(correct=4, incorrect=1),
            "dog [/bold]": ClassResult(correct=5, incorrect=0),
        },
    )
    assert (status.head_path, status.model_path) == (None, None)
    assert status.refusals == (Refusal("c", "shape", 1, "expected [16], got [17]", 1.0),)
    text = rendered(status)
    for piece in (
        "fleet barn, fedtc, task ",
        ", running",
        "90.0% (9/10)",
        "2 submissions, 1 not in a head yet; 2 of 3 classes covered, without prototypes: dog [/bold]",
        "few prototypes of fox 4: add images or devices",
        "next head: with 1 submission, or at ",
        "head 1 (current): 10 prototypes of 1 device, accuracy 90.0% (9/10) on held-out images, 80.0% over all classes",
        "refused 1 x shape from c: expected [16], got [17]",
    ):
        assert piece in text


def test_accuracy_with_the_prior_is_shown(busy: Store) -> None:
    """A device that does not report it counts as it does without."""
    assert collected(busy).heads[0].held_out.with_prior is None
    for device, made in (("b", replace(evaluation(), correct_with_prior=10)), ("c", evaluation())):
        busy.evaluations.put(device, made, digest=b"p", now_s=61.0)
    status = collected(busy)
    assert status.heads[0].held_out.with_prior == pytest.approx(28 / 30)
    assert [row.with_prior for row in status.devices if row.device in {"a", "b"}] == [None, 1.0]
    assert "over all classes, 93.3% with each place's prior" in rendered(status)


def test_calibration_is_shown(started: Store) -> None:
    add_head(started, 1)
    figures = {"calibrated_from": 1.0, "calibration_images": 311.6}
    started.heads.put(dataclasses.replace(started.heads.all()[0], version=2, metrics=figures))
    started.heads.put_rollout(TASK, initial_state([1, 2]))
    text = rendered(collected(started))
    assert "head 2 (current): head 1, calibrated on 312 held-out images: 10 prototypes of 1 device" in text


def test_current_files_are_shown_when_they_are_written(started: Store, tmp_path: Path) -> None:
    """Not those of the head before."""
    add_head(started, 1)
    head, model_file = tmp_path / "head.onnx", tmp_path / "model.onnx"
    for content, expected in (
        (None, (None, None)),
        (b"of head 0", (None, None)),
        (b"head", (str(head), str(model_file))),
    ):
        model_file.touch()
        if content is not None:
            head.write_bytes(content)
        status = collected(started)
        assert (status.head_path, status.model_path) == expected
    assert f"current: {head}" in rendered(status)
    model_file.unlink()
    status = collected(started)
    assert (status.head_path, status.model_path) == (str(head), None)


def test_rounds(tmp_path: Path) -> None:
    """The open round, submissions that still count, devices with a problem; and the end of the rounds."""
    task = replace(TASK_FILE, algorithm="fpl", fpl=FPL(rounds=2), rounds=Rounds(min_devices=1))
    store = started_store(tmp_path, task)
    tensors = BlobRef(digest=bytes(32), size_bytes=1, name="tensors-1")
    add_head(store, 1, tensors=tensors, a=b"a".hex(), b=b"b".hex())
    store.submissions.put(TASK, submission_row("a", {0: 1, 2: 1}, 200.0, number=1))
    store.submissions.put(TASK, submission_row("b", {0: 1}, number=0))
    store.devices.put_info("b", device_info(problem="no room for [graphs]"), now_s=11.0)
    status = collected(store)
    assert status.round == model.Round(
        number=1, min_devices=1, rounds=2, over=False, devices=("a",), carried=("b",)
    )
    assert (status.waiting, status.closes_at_s) == (1, 260.0)
    problem = "no room for [graphs]"
    assert [(row.round, row.problem) for row in status.devices] == [(1, ""), (0, problem)]
    text = rendered(status)
    assert "round 1 of 2 is open, submitted: a; from earlier rounds: b; it closes at " in text
    assert f"problem of b: {problem}" in text
    add_head(store, 2)
    status = collected(store)
    assert status.round == model.Round(number=2, min_devices=1, rounds=2, over=True, devices=(), carried=())
    assert status.closes_at_s is None
    assert "all 2 rounds are over" in rendered(status)


@pytest.mark.parametrize("algorithm", ["fedtc", "fedpcl"])
def test_accuracy_over_all_classes(tmp_path: Path, algorithm: str) -> None:
    """All devices together evaluate the fleet's model; each evaluates a personal model, which is on no other.

    Three devices have one class each. A personal model may predict it for everything.
    """
    store = started_store(tmp_path, replace(TASK_FILE, algorithm=algorithm))
    add_head(store, 1)
    for label, name in enumerate("abc"):
        store.submissions.put(TASK, submission_row(name, {label: 1}))
        counts = tuple(50 if each == label else 0 for each in range(3))
        made = Evaluation(task=TASK, head_version=1, correct=counts, incorrect=(0, 0, 0))
        store.evaluations.put(name, made, digest=b"e", now_s=60.0)
    status = collected(store)
    each, fleet = (1 / 3, 1 / 3) if algorithm == "fedpcl" else (None, 1.0)
    assert [(row.accuracy, row.balanced) for row in status.devices] == [(1.0, each)] * 3
    assert (status.heads[0].held_out.accuracy, status.heads[0].held_out.balanced) == (1.0, fleet)
    assert ("100.0% (50/50) over all 33.3%" in " ".join(rendered(status).split())) == (algorithm == "fedpcl")


def test_confused_classes_of_the_current_head_are_pooled(busy: Store) -> None:
    version = busy.heads.rollout(TASK).current
    for name, confused in (("a", (Confused(2, 0, 3), Confused(0, 1, 1))), ("b", (Confused(0, 1, 4),))):
        made = Evaluation(
            task=TASK,
            head_version=version,
            correct=(5, 0, 1),
            incorrect=(4, 0, 3),
            confused=confused,
            novelty_images=(13, *[0] * 31),
        )
        busy.evaluations.put(name, made, digest=name.encode(), now_s=60.0)
    status = collected(busy)
    (found,) = [head.held_out.confused for head in status.heads if head.held_out.confused]
    zero, one, two = status.classes
    assert found == (
        Confusion(label=zero, predicted=one, images=5, of=18),
        Confusion(label=two, predicted=zero, images=3, of=8),
    )
    text = rendered(status)
    assert f"confused {zero} as {one} 5 of 18, {two} as {zero} 3 of 8\n" in text
    assert "unknown not answered yet: the devices need 24 held-out images more\n" in text


def test_texts_of_devices_cannot_control_the_terminal(tmp_path: Path) -> None:
    """Escape sequences, line ends and bidirectional controls are printed escaped; the status has them unchanged."""
    store, words = busy_store(tmp_path), "\x1b[2J\x1b]0;mine\x07\nhead 9 (current)\u202e"
    store.devices.put_info("a", device_info(problem=words), now_s=11.0)
    store.refusals.count("c", reason="malformed", detail=f"Invalid enum value '{words}'", now_s=2.0)
    status = collected(store)
    assert status.devices[0].problem == words
    text = rendered(status)
    assert r"problem of a: \x1b[2J\x1b]0;mine\x07\nhead 9 (current)\u202e" in text
    assert all(line.isprintable() for line in text.split("\n"))
    assert "head 9 (current)" not in {line.strip() for line in text.split("\n")}


def test_nothing_is_truncated_on_a_narrow_terminal(busy: Store) -> None:
    """Device names and numbers are complete in 80 columns, on several lines."""
    busy.submissions.put(TASK, submission_row("the-device-in-the-barn-7f3a", {0: 3000}, received_s=300.0))
    text = rendered(collected(busy), width=80)
    for piece in ("the-device", "7f3a", "3000", "90.0% (9/10)", "with 1 submission"):
        assert piece in text
    assert "\u2026" not in text


def test_quorum_above_enrolled_devices_is_shown(tmp_path: Path) -> None:
    """Of the first head and of later ones, in a closed fleet; a revoked device does not count."""
    with contextlib.closing(started_store(tmp_path, replace(TASK_FILE, retrain_after=3))) as store:
        store.keys.enroll("a", bytes(32), now_s=1.0)
        store.keys.enroll("b", bytes(32), now_s=1.0)
        store.keys.revoke("b", now_s=2.0)
        assert collected(store).collection_problem == ""
        store.keys.close_fleet()
        problem = "quorum 2 cannot be reached: 1 device is enrolled; enroll more or lower quorum"
        assert collected(store).collection_problem == problem
        assert f"too few devices {problem}" in rendered(collected(store))
        store.keys.enroll("b", bytes(32), now_s=3.0)
        assert collected(store).collection_problem == ""
        add_head(store, 1)
        assert collected(store).collection_problem.startswith(
            "retrain_after 3 cannot be reached: 2 devices are"
        )


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (TrainingProgress(3), "epoch 0 of ?"),
        (TrainingProgress(3, epoch=4, epochs=15, loss=0.5), "epoch 4 of 15"),
    ],
)
def test_running_training(started: Store, progress: TrainingProgress, text: str) -> None:
    plan_head(started, 3, state="training", progress=progress)
    assert f"training head 3: {text}" in rendered(collected(started))


def test_stopped_intake(started: Store, tmp_path: Path) -> None:
    stop_reason.create(tmp_path)
    assert collected(started).intake == StopReason()
    assert "intake" not in rendered(collected(started))
    stop_reason.write(tmp_path, StopReason(100.0, "the disk is [full]"))
    assert collected(started).intake == StopReason(100.0, "the disk is [full]")
    text = rendered(collected(started))
    assert "intake stopped since 1970-01-01" in text
    assert ": the disk is [full]" in text


def test_intake_on_a_filesystem_that_has_become_read_only(
    started: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running aggregator cannot write that its intake has stopped; a backup is no running aggregator."""
    stop_reason.create(tmp_path)
    for file in tmp_path.iterdir():
        os.utime(file, (200.0, 200.0))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    found = collected(started).intake
    assert found.stopped_s == 200.0
    assert "the filesystem is read-only" in found.reason
    started.close()
    assert collected(open_store(tmp_path, read_only=True)).intake == StopReason()


def test_heads_and_the_devices_that_use_them(busy: Store) -> None:
    """The current, the candidate and a rejected head, the head of each device, and the devices that cannot use it."""
    for version in (2, 3):
        add_head(busy, version)
    heads.evaluate(busy, "a", 3, correct=8, previous=9)
    trial = Trial(3, 70.0, ("a", "b"), 2**32)
    busy.heads.put_rollout(TASK, State(newest=3, current=1, trial=trial, rejected={2: "a [says] no"}))
    for device, version in (("a", 3), ("idle", 1)):
        busy.devices.put_info(device, device_info(head_version=version), now_s=12.0)
    zeros = (0,) * 3
    broken = Evaluation(task=TASK, head_version=3, correct=zeros, incorrect=zeros, problem="it is [NaN]")
    busy.evaluations.put("idle", broken, digest=b"x", now_s=61.0)
    status = collected(busy)
    summary = "accuracy 80.0% (8/10) on 1 canary, 90.0% (9/10) with the previous head"
    candidate = model.Candidate(version=3, canaries=("a", "b"), awaited=("b",), since_s=70.0, summary=summary)
    assert status.rollout == model.Rollout(newest=3, current=1, candidate=candidate)
    assert [(head.state, head.reason) for head in status.heads] == [
        ("current", ""),
        ("rejected", "a [says] no"),
        ("candidate", ""),
    ]
    assert {row.device: (row.head, row.head_problem) for row in status.devices} == {
        "a": (3, ""),
        "b": (0, ""),
        "idle": (1, "it is [NaN]"),
    }
    assert status.heads[2].held_out.devices == 1
    text = rendered(status)
    for piece in (
        "head 1 (current): 10 prototypes",
        "a [says] no",
        f"head 3 is evaluated by 2 canaries: {summary}; awaited: b",
        "head not used by idle: it is [NaN]",
    ):
        assert piece in text


@pytest.mark.parametrize(("tolerated", "canaries"), [(0.0, "on 3 canaries"), (0.2, "on 1 ")])
def test_candidate_is_compared_by_the_settings_of_the_task(
    tmp_path: Path, tolerated: float, canaries: str
) -> None:
    """The best and the worst comparison do not count if one of three canaries is tolerated."""
    rollout = msgspec.structs.replace(TASK_FILE.rollout, tolerated_fraction=tolerated)
    store = started_store(tmp_path, msgspec.structs.replace(TASK_FILE, rollout=rollout))
    add_head(store, 1)
    add_head(store, 2)
    for device, correct in (("a", 1), ("b", 5), ("c", 9)):
        heads.evaluate(store, device, 2, correct=correct, previous=5)
    trial = Trial(2, 70.0, ("a", "b", "c"), 2**32)
    store.heads.put_rollout(TASK, State(newest=2, current=1, trial=trial))
    rollout_status = collect_status(store).rollout
    assert rollout_status is not None
    assert rollout_status.candidate is not None
    assert canaries in rollout_status.candidate.summary


def test_waiting_candidate(busy: Store) -> None:
    """A candidate without canaries."""
    add_head(busy, 2)
    busy.heads.put_rollout(TASK, State(newest=2, current=1, trial=Trial(2, 70.0)))
    assert "head 2 waits for devices to come online and evaluate it" in rendered(collected(busy))


def test_quotas_are_shown_where_they_are_set(tmp_path: Path) -> None:
    """And once more those that are nearly used up, of which an operator has to know."""
    limits = Limits(max_devices=10, max_storage_mb=0.002, uploads_per_hour=60)
    with contextlib.closing(started_store(tmp_path, replace(TASK_FILE, limits=limits))) as store:
        store.keys.pin("a", bytes(32), now_s=1.0)
        store.submissions.put(TASK, submission_row("a", {0: 6}))
        store.submissions.put(TASK, submission_row("b", {0: 6}))
        store.usages.put(FLEET, Usage(store.clock.now_s(), submissions=10))
        text = rendered(collected(store))
    storage = "0.001907 of 0.002 MiB of submissions (limits.max_storage_mb)"
    assert f"quotas 1 of 10 devices (limits.max_devices), {storage}, 10 of 60 uploads an hour" in text
    assert f"quota nearly used up {storage}: raise it" in text


def test_outliers_that_are_not_quarantined(started: Store) -> None:
    """The newest head's warning is shown."""
    digest = started.blobs.put(b"head")
    for version, warning in ((1, "old"), (2, "2 of [9] devices are far from the others")):
        heads.add_head(started, version, digest=digest, warning=warning)
    status = collect_status(started)
    started.close()
    assert [head.warning for head in status.heads] == ["old", "2 of [9] devices are far from the others"]
    assert "outliers of head 2: 2 of [9] devices are far from the others" in rendered(status)


def test_head_without_the_adapter(started: Store) -> None:
    """It is shown with what to install."""
    add_head(started, 1)
    head = started.heads.all()[0]
    started.heads.put(dataclasses.replace(head, version=2, metrics={"adapter_missing": 1.0}))
    lines = [line for line in rendered(collected(started)).splitlines() if line.startswith("head ")]
    missing = f"adapter not tried (PyTorch is not installed: {INSTALL})"
    assert [missing in line for line in sorted(lines)] == [False, True]


def test_quarantined_and_released_devices(busy: Store) -> None:
    for device in "ab":
        busy.quarantine.add(TASK, device, reason="far [off]", now_s=100.0)
    busy.quarantine.release(TASK, "b", now_s=200.0)
    status = collected(busy)
    assert [(one.device, one.since_s, one.released_s) for one in status.quarantine] == [
        ("a", 100.0, None),
        ("b", 100.0, 200.0),
    ]
    text = rendered(status)
    assert "quarantined a since 1970-01-01 " in text
    assert "released b since 1970-01-01 " in text
    assert text.count(": far [off]") == 2


def test_enrolled_device_without_presence_is_shown(busy: Store) -> None:
    """It may be unable to connect. A device that was revoked before its first message is not shown."""
    for device in ("a", "new", "gone"):
        busy.keys.enroll(device, device.encode(), now_s=1.0)
    busy.keys.revoke("gone", now_s=2.0)
    busy.keys.close_fleet()
    status = collected(busy)
    assert {row.device: row.state for row in status.devices} == {
        "a": "online", "b": "not enrolled", "idle": "not enrolled", "new": "enrolled"
    }  # fmt: skip
    assert status.enrollment == model.Enrollment(closed=True, enrolled=2, first_use=0, revoked=1)
    assert "closed, 2 enrolled, 1 revoked" in rendered(status)


def test_submissions_of_devices_that_are_not_enrolled_cover_no_class(busy: Store) -> None:
    """No head is trained on them."""
    before = collected(busy)
    busy.keys.enroll("b", b"b", now_s=1.0)
    busy.keys.close_fleet()
    after = collected(busy)
    assert [(each.prototypes, each.devices) for each in before.coverage.values()] == [(9, 2), (0, 0), (4, 1)]
    assert [(each.prototypes, each.devices) for each in after.coverage.values()] == [(3, 1), (0, 0), (0, 0)]


def test_greatest_reported_privacy_loss_is_shown(busy: Store) -> None:
    """Over all tasks; the number of images of such a device is not known and not shown."""
    assert "epsilon" not in rendered(collected(busy))
    for total in (1.5, 3.25, 2.0):
        busy.devices.raise_epsilon("a", total)
    status = collected(busy)
    assert {row.device: row.epsilon for row in status.devices} == {"a": 3.25, "b": None, "idle": None}
    text = rendered(status)
    assert "epsilon" in text
    (row,) = (line for line in text.splitlines() if line.startswith("a "))
    assert row.split()[:3] == ["a", "online", "2"]  # then the number of classes
    assert "3.25" in row


def test_forgotten_devices_are_shown(busy: Store) -> None:
    """With the head in use that learned from one, and that one has uploaded again."""
    for device, head in (("a", 1), ("gone", 0)):
        busy.forgotten.put(TASK, ForgottenDevice(device, head, 50.0))
    status = collected(busy)
    assert [(each.device, each.head) for each in status.forgotten] == [("a", 1), ("gone", 0)]
    text = rendered(status)
    assert re.search(
        r"forgotten a since [0-9: -]+: head 1 learned from it, and is used until the next one; "
        r"it has uploaded again\n",
        text,
    )
    assert re.search(r"forgotten gone since [0-9: -]+\n", text)


def test_device_that_has_lost_its_record_of_privacy_is_an_alarm(tmp_path: Path) -> None:
    with contextlib.closing(private_store(tmp_path)) as store:
        store.devices.merge_releases("a", (Released(2.0, 1, 3),))
        assert not [each for each in collected(store).attention if "lost record" in each.title]
        store.devices.merge_releases("a", ())
        (alarm,) = [each for each in collected(store).attention if "lost record" in each.title]
        assert (alarm.level, alarm.title) == ("error", "1 device with a lost record of privacy")
        assert alarm.text.startswith("a: its record lacks 3 private submissions")
        store.devices.merge_releases("a", (Released(2.0, 1, 3),))
        assert not [each for each in collected(store).attention if "lost record" in each.title]


@pytest.mark.parametrize(("images", "is_poor"), [(3_000, True), (400_000, False)])
def test_a_person_as_the_unit_and_too_few_images_for_its_noise(
    tmp_path: Path, images: int, *, is_poor: bool
) -> None:
    """The page says the unit, and warns of a head that has less than ten times what the noise hides."""
    with contextlib.closing(private_store(tmp_path)) as store:
        budget = PrivacyBudget(epsilon=2.0, map="m", max_epsilon=4.0, unit="person", images_per_person=10)
        store.facts.put(replace(store.served_task(), privacy=PrivacySettings(dp=budget)))
        add_head(store, 1, a="61", b="62")
        store.heads.put(dataclasses.replace(store.heads.all()[-1], prototypes=images, devices=100))
        status = collected(store)
    assert status.privacy is not None
    assert status.privacy.unit == "one person, of whom at most 10 images count"
    assert status.privacy.hidden == hidden_images(budget.noise_multiplier, devices=100)
    text = rendered(status, width=400)
    assert "4 for a device, of one person, of whom at most 10 images count (delta" in text
    warning = f"hides {status.privacy.hidden} images of a class, of about {images} in all: more images"
    assert (warning in text) == (status.privacy.is_poor) == is_poor


def test_privacy_and_sums_of_a_second_operator(tmp_path: Path) -> None:
    """The budget, the second operator and its lists, in two lines; a list that waits, is refused or is opened."""
    with contextlib.closing(private_store(tmp_path)) as store:
        status = collected(store)
        text = rendered(status, width=400)
        assert (
            "privacy epsilon 2 for a submission, 4 for a device, of one image (delta 1e-05), conditional: only if the "
            "second operator is honest, and 2.00 for a submission to both operators together; at most 3.60 spent, "
            "1 device near the limit\n"
            "sums second operator 6262626262626262, seal key 6161616161616161; at least 2 devices in a sum, of which "
            "25% may add no noise; 1 list of 2 devices opened, 2 left out, 2 requested, 1 waiting\n"
        ) in text
        assert "next head: waits for the second operator since" in text
        assert "list left out of all heads 2 devices: a device has lied: start a new task" in text
        lists = sums_of(store.facts, TASK)
        for changes, waits, refused in (
            ({}, 1, 0),
            ({"problem": "f is unknown"}, 0, 1),
            ({"masks": "00"}, 0, 0),
        ):
            assert lists.pending is not None
            put_sums(store.facts, replace(lists, pending=replace(lists.pending, **changes)))
            text = rendered(collected(store))
            assert ("waiting for the second operator of 2 devices" in text) == waits
            assert ("sum not opened of 2 devices" in text) == refused
            metrics = metrics_text(read_snapshot(tmp_path)).decode()
            assert ("protofleet_sum_requested_timestamp_seconds{" in metrics) == waits
            assert f'protofleet_sum_refused{{fleet="barn"}} {refused}.0' in metrics
