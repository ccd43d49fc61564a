"""Tests for `aggregator status`: the collected values and the printed text."""

import io
import re
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from aggregator.algorithms.fpl import FPL
from aggregator.config.schema import Rounds, TaskFile
from aggregator.coordination.canary_comparison import CanaryResult
from aggregator.coordination.rollout_state import State, Trial
from aggregator.coordination.round_state import Entry
from aggregator.ingest import intake_status
from aggregator.ingest.intake_status import Intake
from aggregator.status import model
from aggregator.status.collect import collect_status
from aggregator.status.render import render_status
from aggregator.storage.devices import Refusal
from aggregator.storage.forgotten_devices import ForgottenDevice
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.stored_values import HeadRateLimit, ServedTask, TrainingProgress
from aggregator.storage.submissions import SubmissionRecord
from protocol.errors import StateError
from protocol.wire.messages import BlobRef, Evaluation
from tests.support.clocks import FakeClock
from tests.support.submissions import TASK, device_info, evaluation

TASK_FILE = TaskFile(
    classes=("cat", "dog [/bold]", "fox"), backbones=("b.onnx",), fleet="barn", quorum=2, deadline_s=60.0
)


def _row(
    device: str, per_class: dict[int, int], received_s: float = 100.0, *, number: int = 0
) -> SubmissionRecord:
    entry = Entry(1, device.encode(), received_s, number)
    return SubmissionRecord(device, entry, 1000, 50, sum(per_class.values()), per_class)


def _add_head(store: Store, version: int, *, tensors: BlobRef | None = None, **members: str) -> None:
    members = members or {"a": b"a".hex()}
    digest = store.blobs.put(b"head")
    store.heads.add(HeadRecord(version, TASK, digest, 99, 50.0, 10, members, {"loss": 0.5}, tensors))


def _started(folder: Path, task: TaskFile = TASK_FILE) -> Store:
    store = Store(folder, lock=True)
    store.clock = FakeClock(1e6)
    served = (TASK, 1, task.fleet, task.algorithm, task.classes)
    store.facts.put(ServedTask(*served, settings=task.settings, rollout=task.rollout))
    return store


def _busy(folder: Path) -> Store:
    store = _started(folder)
    store.devices.put_presence("a", state="online", epoch=1, now_s=10.0)
    store.devices.put_info("a", device_info(runtime="CPU", images={"cat": 30, "fox": 20}), now_s=11.0)
    store.devices.put_presence("idle", state="offline", epoch=1, now_s=12.0)
    store.submissions.put(TASK, _row("a", {0: 6, 2: 4}))
    _add_head(store, 1)
    store.evaluations.put("a", evaluation(), digest=b"e", now_s=60.0)
    store.submissions.put(TASK, _row("b", {0: 3}, received_s=200.0))
    store.refusals.count("c", reason="shape", detail="expected [16], got [17]", now_s=1.0)
    return store


def _collect(store: Store) -> model.Status:
    """Return the status after a round trip through its JSON."""
    status = collect_status(store)
    assert msgspec.json.decode(msgspec.json.encode(status), type=model.Status) == status
    return status


def _text(status: model.Status, *, width: int = 200) -> str:
    text = io.StringIO()
    render_status(status, Console(file=text, width=width))
    return text.getvalue()


def test_status_at_first_start(tmp_path: Path) -> None:
    """Everything is empty, and a read-only store is enough."""
    store = _started(tmp_path)
    status = _collect(Store(tmp_path, read_only=True))
    store.close()
    assert (status.fleet, status.classes, status.quorum) == ("barn", TASK_FILE.classes, 2)
    assert (status.devices, status.heads, status.refusals) == ((), (), ())
    assert (status.submissions, status.waiting, status.closes_at_s) == (0, 0, None)
    assert (status.training, status.round, status.head_path, status.model_path) == (None,) * 4
    assert "without prototypes: cat, dog [/bold], fox" in _text(status)


def test_limit_of_trainings_is_shown(tmp_path: Path) -> None:
    """Where submissions wait for it."""
    store = _busy(tmp_path)
    assert "heads_per_hour" not in _text(_collect(store))
    store.facts.put(HeadRateLimit(300.0))
    status = _collect(store)
    assert status.rate_limited_until_s == 300.0
    assert re.search(r"next head: .*, but not before [0-9: -]+ \(limits.heads_per_hour\)", _text(status))


def test_status_of_busy_aggregator(tmp_path: Path) -> None:
    folder = tmp_path / "[red]state[/red]"
    status = _collect(_busy(folder))
    assert {row.device: (row.state, row.images, row.prototypes) for row in status.devices} == {
        "a": ("online", 50, 10),
        "b": ("unknown", 0, 3),
        "idle": ("offline", 0, 0),
    }
    assert status.devices[0].accuracy == 0.9
    assert status.coverage == {
        "cat": model.Coverage(prototypes=9, devices=2),
        "dog [/bold]": model.Coverage(prototypes=0, devices=0),
        "fox": model.Coverage(prototypes=4, devices=1),
    }
    assert (status.submissions, status.waiting, status.closes_at_s) == (2, 1, 260.0)
    (head,) = status.heads
    assert (head.version, head.devices, head.prototypes, len(head.sha256)) == (1, 1, 10, 64)
    assert head.held_out == model.HeldOut(correct=9, incorrect=1, accuracy=0.9, balanced=0.8, devices=1)
    assert (status.head_path, status.model_path) == (str(folder / "head.onnx"), None)
    assert status.refusals == (Refusal("c", "shape", 1, "expected [16], got [17]"),)
    text = _text(status)
    for piece in (
        "fleet barn, fedtc, task ",
        "running",
        "90.0% (9/10)",
        "2 submissions, 1 not in a head yet; 2 of 3 classes covered, without prototypes: dog [/bold]",
        "few prototypes of fox 4: add images or devices, or lower batch_size",
        "next head: with 1 submission, or at ",
        "head 1 (current): 10 prototypes of 1 device, accuracy 90.0% (9/10) on held-out images, 80.0% over all classes",
        "refused 1 x shape from c: expected [16], got [17]",
        f"current: {folder}/head.onnx",
    ):
        assert piece in text
    (folder / "model.onnx").touch()
    assert _collect(Store(folder, read_only=True)).model_path == str(folder / "model.onnx")


def test_rounds(tmp_path: Path) -> None:
    """The open round, submissions that still count, devices with a problem; and the end of the rounds."""
    task = replace(TASK_FILE, algorithm="fpl", fpl=FPL(rounds=2), rounds=Rounds(min_devices=1))
    store = _started(tmp_path, task)
    tensors = BlobRef(digest=bytes(32), size_bytes=1, name="tensors-1")
    _add_head(store, 1, tensors=tensors, a=b"a".hex(), b=b"b".hex())
    store.submissions.put(TASK, _row("a", {0: 1, 2: 1}, 200.0, number=1))
    store.submissions.put(TASK, _row("b", {0: 1}, number=0))
    store.devices.put_info("b", device_info(problem="no room for [graphs]"), now_s=11.0)
    status = _collect(store)
    assert status.round == model.Round(
        number=1, min_devices=1, rounds=2, over=False, devices=("a",), carried=("b",)
    )
    assert (status.waiting, status.closes_at_s) == (1, 260.0)
    problem = "no room for [graphs]"
    assert [(row.round, row.problem) for row in status.devices] == [(1, ""), (0, problem)]
    text = _text(status)
    assert "round 1 of 2 is open, submitted: a; from earlier rounds: b; it closes at " in text
    assert f"problem of b: {problem}" in text
    _add_head(store, 2)
    status = _collect(store)
    assert status.round == model.Round(number=2, min_devices=1, rounds=2, over=True, devices=(), carried=())
    assert status.closes_at_s is None
    assert "all 2 rounds are over" in _text(status)


@pytest.mark.parametrize("algorithm", ["fedtc", "fedpcl"])
def test_accuracy_over_all_classes(tmp_path: Path, algorithm: str) -> None:
    """All devices together evaluate the fleet's model; each evaluates a personal model, which is on no other.

    Three devices have one class each. A personal model may predict it for everything.
    """
    store = _started(tmp_path, replace(TASK_FILE, algorithm=algorithm))
    _add_head(store, 1)
    for label, name in enumerate("abc"):
        store.submissions.put(TASK, _row(name, {label: 1}))
        counts = tuple(50 if each == label else 0 for each in range(3))
        made = Evaluation(task=TASK, head_version=1, correct=counts, incorrect=(0, 0, 0))
        store.evaluations.put(name, made, digest=b"e", now_s=60.0)
    status = _collect(store)
    each, fleet = (1 / 3, 1 / 3) if algorithm == "fedpcl" else (None, 1.0)
    assert [(row.accuracy, row.balanced) for row in status.devices] == [(1.0, each)] * 3
    assert (status.heads[0].held_out.accuracy, status.heads[0].held_out.balanced) == (1.0, fleet)
    assert ("100.0% (50/50) over all 33.3%" in " ".join(_text(status).split())) == (algorithm == "fedpcl")


def test_texts_of_devices_cannot_control_the_terminal(tmp_path: Path) -> None:
    """Escape sequences, line ends and bidirectional controls are printed escaped; the status has them unchanged."""
    store, words = _busy(tmp_path), "\x1b[2J\x1b]0;mine\x07\nhead 9 (current)\u202e"
    store.devices.put_info("a", device_info(problem=words), now_s=11.0)
    store.refusals.count("c", reason="malformed", detail=f"Invalid enum value '{words}'", now_s=2.0)
    status = _collect(store)
    assert status.devices[0].problem == words
    text = _text(status)
    assert r"problem of a: \x1b[2J\x1b]0;mine\x07\nhead 9 (current)\u202e" in text
    assert all(line.isprintable() for line in text.split("\n"))
    assert "head 9 (current)" not in {line.strip() for line in text.split("\n")}


def test_nothing_is_truncated_on_a_narrow_terminal(tmp_path: Path) -> None:
    """Device names and numbers are complete in 80 columns, on several lines."""
    store = _busy(tmp_path)
    store.submissions.put(TASK, _row("the-device-in-the-barn-7f3a", {0: 3000}, received_s=300.0))
    text = _text(_collect(store), width=80)
    for piece in ("the-device", "7f3a", "3000", "90.0% (9/10)", "with 1 submission"):
        assert piece in text
    assert "\u2026" not in text


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (TrainingProgress(3), "epoch 0 of ?"),
        (TrainingProgress(3, epoch=4, epochs=15, loss=0.5), "epoch 4 of 15"),
    ],
)
def test_running_training(tmp_path: Path, progress: TrainingProgress, text: str) -> None:
    store = _started(tmp_path)
    store.facts.put(progress)
    assert f"training head 3: {text}" in _text(_collect(store))


def test_locked_state_is_running(tmp_path: Path) -> None:
    store = _started(tmp_path)
    assert "not running" not in _text(_collect(Store(tmp_path, read_only=True)))
    with pytest.raises(StateError, match=f"`aggregator run` already runs on {tmp_path}: stop it"):
        Store(tmp_path, lock=True)
    store.close()
    assert "not running" in _text(_collect(Store(tmp_path, read_only=True)))
    Store(tmp_path, lock=True).close()


def test_state_without_task_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"no task in .* yet: start `aggregator run`"):
        collect_status(Store(tmp_path))


def test_stopped_intake(tmp_path: Path) -> None:
    store = _started(tmp_path)
    intake_status.create(tmp_path)
    assert _collect(store).intake == Intake()
    assert "intake" not in _text(_collect(store))
    intake_status.write(tmp_path, Intake(100.0, "the disk is [full]"))
    assert _collect(store).intake == Intake(100.0, "the disk is [full]")
    text = _text(_collect(store))
    assert "intake stopped since 1970-01-01" in text
    assert ": the disk is [full]" in text


def test_heads_and_the_devices_that_use_them(tmp_path: Path) -> None:
    """The current, the candidate and a rejected head, the head of each device, and the devices that cannot use it."""
    store = _busy(tmp_path)
    for version in (2, 3):
        _add_head(store, version)
    trial = Trial(3, 70.0, ("a", "idle"), 2**32, {"a": CanaryResult(8, 10, 9)})
    store.heads.put_rollout(TASK, State(newest=3, current=1, trial=trial, rejected={2: "a [says] no"}))
    for device, version in (("a", 3), ("idle", 1)):
        store.devices.put_info(device, device_info(head_version=version), now_s=12.0)
    zeros = (0,) * 3
    broken = Evaluation(task=TASK, head_version=3, correct=zeros, incorrect=zeros, problem="it is [NaN]")
    store.evaluations.put("idle", broken, digest=b"x", now_s=61.0)
    status = _collect(store)
    summary = "accuracy 80.0% (8/10) on 1 canary, 90.0% (9/10) with the previous head"
    candidate = model.Candidate(
        version=3, canaries=("a", "idle"), awaited=("idle",), since_s=70.0, summary=summary
    )
    assert status.rollout == model.Rollout(current=1, candidate=candidate, requested=None)
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
    assert status.heads[2].held_out.devices == 0
    text = _text(status)
    for piece in (
        "head 1 (current): 10 prototypes",
        "a [says] no",
        f"head 3 is evaluated by 2 canaries: {summary}; awaited: idle",
        "head not used by idle: it is [NaN]",
    ):
        assert piece in text


@pytest.mark.parametrize(("tolerated", "canaries"), [(0.0, "on 3 canaries"), (0.2, "on 1 ")])
def test_candidate_is_compared_by_the_settings_of_the_task(
    tmp_path: Path, tolerated: float, canaries: str
) -> None:
    """The best and the worst comparison do not count if one of three canaries is tolerated."""
    rollout = msgspec.structs.replace(TASK_FILE.rollout, tolerated_fraction=tolerated)
    store = _started(tmp_path, msgspec.structs.replace(TASK_FILE, rollout=rollout))
    _add_head(store, 1)
    _add_head(store, 2)
    answers = {device: CanaryResult(correct, 10, 5) for device, correct in (("a", 1), ("b", 5), ("c", 9))}
    trial = Trial(2, 70.0, ("a", "b", "c"), 2**32, answers)
    store.heads.put_rollout(TASK, State(newest=2, current=1, trial=trial))
    rollout_status = collect_status(store).rollout
    assert rollout_status is not None
    assert rollout_status.candidate is not None
    assert canaries in rollout_status.candidate.summary


def test_waiting_candidate_and_pending_command(tmp_path: Path) -> None:
    """A candidate without canaries, and a command that the aggregator has not read yet."""
    store = _busy(tmp_path)
    _add_head(store, 2)
    store.heads.put_rollout(TASK, State(newest=2, current=1, trial=Trial(2, 70.0)))
    assert "head 2 waits for devices to come online and evaluate it" in _text(_collect(store))
    store.commands.add(TASK, "promote", None)
    status = _collect(store)
    assert "head 2 will be current soon, by an operator's command" in _text(status)
    waits = "head 2 will be current when the aggregator is started, by an operator's command"
    assert waits in _text(replace(status, running=False))


def test_outliers_that_are_not_quarantined(tmp_path: Path) -> None:
    """The newest head's warning is shown."""
    store = _started(tmp_path)
    digest = store.blobs.put(b"head")
    for version, warning in ((1, "old"), (2, "2 of [9] devices are far from the others")):
        store.heads.add(HeadRecord(version, TASK, digest, 99, 50.0, 10, {}, {}, warning=warning))
    status = collect_status(store)
    store.close()
    assert [head.warning for head in status.heads] == ["old", "2 of [9] devices are far from the others"]
    assert "outliers of head 2: 2 of [9] devices are far from the others" in _text(status)


def test_quarantined_and_released_devices(tmp_path: Path) -> None:
    store = _busy(tmp_path)
    for device in "ab":
        store.quarantine.add(TASK, device, reason="far [off]", now_s=100.0)
    store.quarantine.release(TASK, "b", now_s=200.0)
    status = _collect(store)
    assert [(one.device, one.since_s, one.released_s) for one in status.quarantine] == [
        ("a", 100.0, None),
        ("b", 100.0, 200.0),
    ]
    text = _text(status)
    assert "quarantined a since 1970-01-01 " in text
    assert "released b since 1970-01-01 " in text
    assert text.count(": far [off]") == 2


def test_enrolled_device_without_presence_is_shown(tmp_path: Path) -> None:
    """It may be unable to connect. A device that was revoked before its first message is not shown."""
    store = _busy(tmp_path)
    for device in ("a", "new", "gone"):
        store.keys.enroll(device, device.encode(), now_s=1.0)
    store.keys.revoke("gone", now_s=2.0)
    store.keys.close_fleet()
    status = _collect(store)
    assert {row.device: row.state for row in status.devices} == {
        "a": "online", "b": "not enrolled", "idle": "not enrolled", "new": "enrolled"
    }  # fmt: skip
    assert status.enrollment == model.Enrollment(closed=True, enrolled=2, first_use=0, revoked=1)
    assert "closed, 2 enrolled, 1 revoked" in _text(status)


def test_submissions_of_devices_that_are_not_enrolled_cover_no_class(tmp_path: Path) -> None:
    """No head is trained on them."""
    store = _busy(tmp_path)
    before = _collect(store)
    store.keys.enroll("b", b"b", now_s=1.0)
    store.keys.close_fleet()
    after = _collect(store)
    assert [(each.prototypes, each.devices) for each in before.coverage.values()] == [(9, 2), (0, 0), (4, 1)]
    assert [(each.prototypes, each.devices) for each in after.coverage.values()] == [(3, 1), (0, 0), (0, 0)]


def test_greatest_reported_privacy_loss_is_shown(tmp_path: Path) -> None:
    """Over all tasks; the number of images of such a device is not known and not shown."""
    store = _busy(tmp_path)
    assert "epsilon" not in _text(_collect(store))
    for total in (1.5, 3.25, 2.0):
        store.devices.raise_epsilon("a", total)
    status = _collect(store)
    assert {row.device: row.epsilon for row in status.devices} == {"a": 3.25, "b": None, "idle": None}
    text = _text(status)
    assert "epsilon" in text
    (row,) = (line for line in text.splitlines() if line.startswith("a "))
    assert row.split()[:3] == ["a", "online", "2"]  # then the number of classes
    assert "3.25" in row


def test_forgotten_devices_are_shown(tmp_path: Path) -> None:
    """With the head in use that learned from one, and that one has uploaded again."""
    store = _busy(tmp_path)
    for device, head in (("a", 1), ("gone", 0)):
        store.forgotten.put(TASK, ForgottenDevice(device, head, 50.0))
    status = _collect(store)
    assert [(each.device, each.head) for each in status.forgotten] == [("a", 1), ("gone", 0)]
    text = _text(status)
    assert re.search(
        r"forgotten a since [0-9: -]+: head 1 learned from it, and is used until the next one; "
        r"it has uploaded again\n",
        text,
    )
    assert re.search(r"forgotten gone since [0-9: -]+\n", text)
