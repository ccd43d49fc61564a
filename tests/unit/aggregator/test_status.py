"""What `aggregator status` shows, for a person and for a program."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from aggregator.algorithms.fpl import FPL
from aggregator.config.schema import TaskFile
from aggregator.coordination.rollout import CanaryResult, State, Trial
from aggregator.coordination.rounds import Entry
from aggregator.ingest import intake_status
from aggregator.status import report, show
from aggregator.storage.facts import ServedTask, TrainingProgress
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from protocol.errors import StateError
from protocol.wire.messages import BlobRef, Evaluation
from tests.support.submissions import TASK, device_info, evaluation

CLASSES = ("cat", "dog [/bold]", "fox")


def _row(
    device: str, per_class: dict[int, int], received_s: float = 100.0, *, number: int = 0
) -> SubmissionRecord:
    return SubmissionRecord(
        device=device,
        entry=Entry(1, device.encode(), received_s, number),
        size_bytes=1000,
        images=50,
        prototypes=sum(per_class.values()),
        per_class=per_class,
    )


def _begun(folder: Path) -> Store:
    """The state of an aggregator that has just started."""
    store = Store(folder)
    task_file = TaskFile(classes=CLASSES, backbones=("b.onnx",), fleet="barn", quorum=2, deadline_s=60.0)
    served = (TASK, 1, task_file.fleet, task_file.algorithm, task_file.classes)
    store.facts.put(ServedTask(*served, settings=task_file.settings))
    store.lock()
    return store


def _busy(folder: Path) -> Store:
    """The state after a head, an evaluation, a late submission and some refusals."""
    store = _begun(folder)
    store.devices.put_presence("a", state="online", epoch=1, now_s=10.0)
    store.devices.put_info("a", device_info(runtime="CPU", images={"cat": 30, "fox": 20}), now_s=11.0)
    store.devices.put_presence("idle", state="offline", epoch=1, now_s=12.0)
    store.submissions.put(TASK, _row("a", {0: 6, 2: 4}))
    store.heads.add(
        HeadRecord(
            version=1,
            task=TASK,
            digest=bytes(32),
            size_bytes=99,
            trained_s=50.0,
            prototypes=10,
            members={"a": b"a".hex()},
            metrics={"loss": 0.5},
        )
    )
    store.evaluations.put("a", evaluation(), digest=b"e", now_s=60.0)
    store.submissions.put(TASK, _row("b", {0: 3}, received_s=200.0))
    store.refusals.count("c", reason="shape", detail="expected [16], got [17]", now_s=1.0)
    return store


def _shown(summary: dict[str, Any]) -> str:
    text = io.StringIO()
    show(summary, Console(file=text, width=200))
    return text.getvalue()


def test_an_aggregator_that_has_just_started(tmp_path: Path) -> None:
    """Nothing is there yet, and the report says so in values that JSON knows."""
    store = _begun(tmp_path)
    summary = report(Store(tmp_path, read_only=True))
    store.close()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["running"]
    assert (summary["fleet"], summary["classes"], summary["quorum"]) == ("barn", list(CLASSES), 2)
    assert summary["devices"] == summary["heads"] == summary["refusals"] == []
    assert (summary["submissions"], summary["waiting"], summary["closes_s"]) == (0, 0, None)
    assert summary["training"] is summary["head_path"] is summary["model_path"] is None
    assert "none of: cat, dog [/bold], fox" in _shown(summary)


def test_a_busy_aggregator(tmp_path: Path) -> None:
    """Devices, coverage, heads with held-out figures, what waits and until when, and refusals."""
    summary = report(_busy(tmp_path))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert {
        row["device"]: (row["state"], row["images"], row["prototypes"]) for row in summary["devices"]
    } == {
        "a": ("online", 50, 10),
        "b": ("unknown", 0, 3),
        "idle": ("offline", 0, 0),
    }
    assert summary["devices"][0]["accuracy"] == 0.9
    assert summary["coverage"] == {
        "cat": {"prototypes": 9, "devices": 2},
        "dog [/bold]": {"prototypes": 0, "devices": 0},
        "fox": {"prototypes": 4, "devices": 1},
    }
    assert (summary["submissions"], summary["waiting"], summary["closes_s"]) == (2, 1, 260.0)
    (head,) = summary["heads"]
    assert (head["version"], head["devices"], head["prototypes"], head["sha256"]) == (1, 1, 10, "0" * 64)
    assert head["held_out"] == {"correct": 9, "incorrect": 1, "accuracy": 0.9, "devices": 1}
    assert summary["head_path"] == str(tmp_path / "head.onnx")
    assert summary["model_path"] is None
    (tmp_path / "model.onnx").touch()
    assert report(Store(tmp_path, read_only=True))["model_path"] == str(tmp_path / "model.onnx")
    assert summary["refusals"] == [
        {"device": "c", "reason": "shape", "count": 1, "detail": "expected [16], got [17]"}
    ]


def test_what_a_person_sees(tmp_path: Path) -> None:
    """Names and details appear as they are, whatever a terminal would make of their brackets."""
    folder = tmp_path / "[red]state[/red]"
    text = _shown(report(_busy(folder)))
    for piece in (
        "fleet barn, fedtc, task ",
        "running",
        "90.0% of 10",
        "2 submissions, 1 not in a head yet; 2 of 3 classes covered, none of: dog [/bold]",
        "next head: once 1 submissions wait for it, or at ",
        "head 1 (current): 10 prototypes of 1 devices, 90.0% right on held-out images",
        "refused 1 x shape from c: expected [16], got [17]",
        f"current: {folder}/head.onnx",
    ):
        assert piece in text


def _in_rounds(folder: Path) -> Store:
    """The state in round 1 of 2: one device has uploaded, and one is a round behind."""
    store = Store(folder)
    task_file = TaskFile(
        classes=CLASSES,
        backbones=("b.onnx",),
        fleet="barn",
        algorithm="fpl",
        quorum=2,
        deadline_s=60.0,
        fpl=FPL(rounds=2),
    )
    served = (TASK, 1, task_file.fleet, task_file.algorithm, task_file.classes)
    store.facts.put(ServedTask(*served, settings=task_file.settings))
    tensors = BlobRef(digest=bytes(32), size_bytes=1, name="tensors-1")
    members = {"a": b"a".hex(), "b": b"b".hex()}
    store.heads.add(HeadRecord(1, TASK, bytes(32), 99, 50.0, 10, members, {"seconds": 0.2}, tensors))
    store.submissions.put(TASK, _row("a", {0: 1, 2: 1}, 200.0, number=1))
    store.submissions.put(TASK, _row("b", {0: 1}, number=0))
    store.devices.put_info("b", device_info(problem="no room for [graphs]"), now_s=11.0)
    return store


def test_an_open_round(tmp_path: Path) -> None:
    """Its number, who is in it, who counts from earlier rounds, when it closes; and what devices suffer from."""
    summary = report(_in_rounds(tmp_path))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["round"] == {
        "number": 1,
        "min_devices": 1,
        "rounds": 2,
        "over": False,
        "devices": ["a"],
        "carried": ["b"],
    }
    assert (summary["waiting"], summary["closes_s"]) == (1, 260.0)
    assert [(row["round"], row["problem"]) for row in summary["devices"]] == [
        (1, ""),
        (0, "no room for [graphs]"),
    ]
    text = _shown(summary)
    assert "round 1 of 2 is open, uploaded: a; from earlier rounds: b; it closes at " in text
    assert "problem of b: no room for [graphs]" in text


def test_what_devices_say_does_nothing_to_a_terminal(tmp_path: Path) -> None:
    """Escapes, line ends and text that runs backwards are shown, and not obeyed; a program gets them as they are."""
    store, words = _busy(tmp_path), "\x1b[2J\x1b]0;mine\x07\nhead 9 (current)\u202e"
    store.devices.put_info("a", device_info(problem=words), now_s=11.0)
    store.refusals.count("c", reason="malformed", detail=f"Invalid enum value '{words}'", now_s=2.0)
    summary = report(store)
    assert next(row for row in summary["devices"] if row["device"] == "a")["problem"] == words
    text = _shown(summary)
    assert r"problem of a: \x1b[2J\x1b]0;mine\x07\nhead 9 (current)\u202e" in text
    assert all(line.isprintable() for line in text.split("\n"))
    assert "head 9 (current)" not in {line.strip() for line in text.split("\n")}


def test_rounds_that_are_over(tmp_path: Path) -> None:
    """Nothing is open any more, and nothing closes."""
    store = _in_rounds(tmp_path)
    store.heads.add(HeadRecord(2, TASK, bytes(32), 99, 50.0, 10, {"a": b"a".hex()}, {}))
    summary = report(store)
    assert summary["round"] == {
        "number": 2,
        "min_devices": 1,
        "rounds": 2,
        "over": True,
        "devices": [],
        "carried": [],
    }
    assert summary["closes_s"] is None
    assert "all 2 rounds are over" in _shown(summary)


def test_a_task_without_rounds_has_none(tmp_path: Path) -> None:
    """The report says so."""
    assert report(_busy(tmp_path))["round"] is None


def test_nothing_is_cut_off_on_a_narrow_terminal(tmp_path: Path) -> None:
    """Names of devices and figures are all there in 80 columns, on however many lines."""
    store = _busy(tmp_path)
    store.submissions.put(TASK, _row("the-device-in-the-barn-7f3a", {0: 3000}, received_s=300.0))
    text = io.StringIO()
    show(report(store), Console(file=text, width=80))
    for piece in ("the-device", "7f3a", "3000", "90.0% of 10", "once 1 submissions"):
        assert piece in text.getvalue()
    assert "\u2026" not in text.getvalue()


def test_a_training_in_progress(tmp_path: Path) -> None:
    """Its version and epoch are shown, also before the first epoch."""
    store = _begun(tmp_path)
    store.facts.put(TrainingProgress(3, {"device": "cpu", "prototypes": 7}))
    assert "training head 3: epoch 0 of ?" in _shown(report(store))
    store.facts.put(TrainingProgress(3, {"epoch": 4, "epochs": 15, "loss": 0.5}))
    assert "training head 3: epoch 4 of 15" in _shown(report(store))


def test_an_aggregator_that_is_gone(tmp_path: Path) -> None:
    """A state that no process holds is not shown as running, and an aggregator may start on it."""
    store = _begun(tmp_path)
    assert "not running" not in _shown(report(Store(tmp_path, read_only=True)))
    with pytest.raises(StateError, match="another aggregator is running in"):
        Store(tmp_path).lock()
    store.close()
    assert "not running" in _shown(report(Store(tmp_path, read_only=True)))
    Store(tmp_path).lock()


def test_a_state_without_a_task(tmp_path: Path) -> None:
    """The message says what to do first."""
    with pytest.raises(StateError, match=r"no task in .* yet: start `aggregator run`"):
        report(Store(tmp_path))


def test_a_stopped_intake_is_shown(tmp_path: Path) -> None:
    """Since when, and why; nothing is said of one that works."""
    _begun(tmp_path)
    intake_status.create(tmp_path)
    assert report(Store(tmp_path, read_only=True))["intake"] == {"stopped_s": None, "reason": ""}
    assert "intake" not in _shown(report(Store(tmp_path, read_only=True)))
    intake_status.write(tmp_path, intake_status.Stopped(100.0, "the disk is [full]"))
    summary = report(Store(tmp_path, read_only=True))
    assert summary["intake"] == {"stopped_s": 100.0, "reason": "the disk is [full]"}
    assert "intake: stopped since 1970-01-01" in _shown(summary)
    assert ": the disk is [full]" in _shown(summary)


def test_heads_in_the_fleet(tmp_path: Path) -> None:
    """Which head is current, tried and rejected and why, which head each device uses, and who does not use it."""
    store = _busy(tmp_path)
    for version in (2, 3):
        store.heads.add(HeadRecord(version, TASK, bytes(32), 99, 50.0, 10, {"a": b"a".hex()}, {}))
    trial = Trial(3, 70.0, ("a", "idle"), 2**32, {"a": CanaryResult(8, 10, 9)})
    store.heads.put_rollout(TASK, State(newest=3, current=1, trial=trial, rejected={2: "a [says] no"}))
    for device, version in (("a", 3), ("idle", 1)):
        store.devices.put_info(device, device_info(head_version=version), now_s=12.0)
    broken = Evaluation(
        task=TASK, head_version=3, correct=(0,) * 3, incorrect=(0,) * 3, problem="it is [NaN]"
    )
    store.evaluations.put("idle", broken, digest=b"x", now_s=61.0)
    summary = report(store)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    figures = "accuracy 80.0% (8/10) on 1 canary, 90.0% (9/10) with the previous head"
    assert summary["rollout"] == {
        "current": 1,
        "candidate": {
            "version": 3, "canaries": ["a", "idle"], "awaited": ["idle"], "since_s": 70.0, "figures": figures,
        },
        "ordered": None,
    }  # fmt: skip
    assert [(head["state"], head["why"]) for head in summary["heads"]] == [
        ("current", ""),
        ("rejected", "a [says] no"),
        ("candidate", ""),
    ]
    assert {row["device"]: (row["head"], row["head_problem"]) for row in summary["devices"]} == {
        "a": (3, ""),
        "b": (0, ""),
        "idle": (1, "it is [NaN]"),
    }
    assert summary["heads"][2]["held_out"]["devices"] == 0
    text = _shown(summary)
    for piece in (
        "head 1 (current): 10 prototypes",
        "a [says] no",
        f"head 3 is tried by 2 canaries: {figures}; it waits for idle",
        "head not used by idle: it is [NaN]",
    ):
        assert piece in text


def test_what_waits_for_somebody(tmp_path: Path) -> None:
    """A candidate that no device was asked to try yet; an order that the aggregator has not taken yet."""
    store = _busy(tmp_path)
    store.heads.add(HeadRecord(2, TASK, store.blobs.put(b"head"), 99, 50.0, 10, {"a": b"a".hex()}, {}))
    store.heads.put_rollout(TASK, State(newest=2, current=1, trial=Trial(2, 70.0)))
    assert "head 2 waits for devices that are online, to try it" in _shown(report(store))
    store.commands.add(TASK, "promote", None)
    summary = report(store)
    assert "head 2 will be current soon: an operator's order waits" in _shown(summary)
    waits = "head 2 will be current when the aggregator is started: an operator's order waits"
    assert waits in _shown({**summary, "running": False})


def test_who_is_enrolled_and_was_never_heard(tmp_path: Path) -> None:
    """Is shown too: it may be the one that cannot connect. Who was revoked before it came is not."""
    store = _busy(tmp_path)
    for device in ("a", "new", "gone"):
        store.keys.enroll(device, device.encode(), now_s=1.0)
    store.keys.revoke("gone", now_s=2.0)
    store.keys.close_fleet()
    assert {row["device"]: row["state"] for row in report(store)["devices"]} == {
        "a": "online", "b": "not enrolled", "idle": "not enrolled", "new": "enrolled"
    }  # fmt: skip
    assert "closed, 2 enrolled, 1 revoked" in _shown(report(store))


def test_the_most_that_a_device_has_spent_on_privacy_is_shown(tmp_path: Path) -> None:
    """Over all tasks, and also if a device says less later; who has said nothing has no figure."""
    store = _busy(tmp_path)
    assert "epsilon" not in _shown(report(store))
    for total in (1.5, 3.25, 2.0):
        store.devices.raise_epsilon("a", total)
    devices = {row["device"]: row["epsilon"] for row in report(store)["devices"]}
    assert devices == {"a": 3.25, "b": None, "idle": None}
    assert "epsilon" in _shown(report(store))
    (row,) = (line for line in _shown(report(store)).splitlines() if line.startswith("a "))
    assert row.split()[:3] == ["a", "online", "2"]  # after it the classes: how many images is not known
    assert "3.25" in _shown(report(store))
