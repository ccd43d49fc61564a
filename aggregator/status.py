"""What `aggregator status` shows, read from the state directory of a running or stopped aggregator.

`--json` prints what `report` returns:
`running, fleet, algorithm, task, classes, quorum, retrain_after, training, submissions, waiting, closes_s,
devices: [device, state, seen_s, runtime, pictures, classes, prototypes, bytes, right, wrong, accuracy],
coverage: {class: {prototypes, devices}}, heads: [version, sha256, devices, prototypes, trained_s, metrics,
held_out: {right, wrong, accuracy, devices}], refusals: [device, reason, count, detail], head_path, model_path`.
"""

import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from aggregator import rounds
from aggregator.store import HeadRow, Store, SubmissionRow
from protocol.errors import StateError

if TYPE_CHECKING:
    from rich.console import Console


def report(store: Store) -> dict[str, Any]:
    """Everything worth knowing, as JSON values; times are unix seconds.

    Raises:
        StateError: no aggregator has run on this state yet.
    """
    task_hex, task_file = store.fact("task"), json.loads(store.fact("task_file") or "null")
    if not task_hex or task_file is None:
        raise StateError(f"no task in {store.folder} yet: start `aggregator run`")
    task = bytes.fromhex(task_hex)
    submissions = store.submissions(task)
    heads = [_head(store, task, row) for row in store.heads(task)]
    state = store.round_state(task)
    settings = rounds.Settings(task_file["quorum"], task_file["deadline_s"], task_file["retrain_after"])
    return {
        "running": store.is_locked(),
        "fleet": task_file["fleet"],
        "algorithm": task_file["algorithm"],
        "task": task_hex,
        "classes": task_file["classes"],
        "quorum": settings.quorum,
        "retrain_after": settings.retrain_after,
        "training": json.loads(store.fact("training") or "null"),
        "submissions": len(submissions),
        "waiting": len(rounds.waiting(state)),
        "closes_s": rounds.closes_at_s(state, settings),
        "devices": _devices(store, task, submissions, state.head_version),
        "coverage": _coverage(task_file["classes"], submissions.values()),
        "heads": heads,
        "refusals": [
            {"device": device, "reason": reason, "count": count, "detail": detail}
            for device, reason, count, detail in store.refusals()
        ],
        "head_path": str((store.folder / "head.onnx").resolve()) if heads else None,
        "model_path": str((store.folder / "model.onnx").resolve()) if heads else None,
    }


def _held_out(right: Iterable[int], wrong: Iterable[int]) -> dict[str, Any]:
    correct, missed = sum(right), sum(wrong)
    accuracy = correct / (correct + missed) if correct + missed else None
    return {"right": correct, "wrong": missed, "accuracy": accuracy}


def _devices(
    store: Store, task: bytes, submissions: dict[str, SubmissionRow], version: int
) -> list[dict[str, Any]]:
    evaluations = store.evaluations(task, version)
    known = {device: (state, seen_s, info) for device, state, seen_s, info in store.devices()}
    rows = []
    for device in sorted(known.keys() | submissions.keys()):
        state, seen_s, info = known.get(device, ("unknown", None, {}))
        row = submissions.get(device)
        rows.append(
            {
                "device": device,
                "state": state,
                "seen_s": seen_s,
                "runtime": info.get("runtime"),
                "pictures": sum(info.get("pictures", {}).values()),
                "classes": len(row.per_class) if row else 0,
                "prototypes": row.prototypes if row else 0,
                "bytes": row.size_bytes if row else 0,
                **_held_out(*evaluations.get(device, ([], []))),
            }
        )
    return rows


def _coverage(classes: list[str], submissions: Iterable[SubmissionRow]) -> dict[str, dict[str, int]]:
    rows = list(submissions)
    return {
        name: {
            "prototypes": sum(row.per_class.get(label, 0) for row in rows),
            "devices": sum(label in row.per_class for row in rows),
        }
        for label, name in enumerate(classes)
    }


def _head(store: Store, task: bytes, row: HeadRow) -> dict[str, Any]:
    evaluations = store.evaluations(task, row.version)
    held_out = _held_out(
        (sum(right) for right, _ in evaluations.values()), (sum(wrong) for _, wrong in evaluations.values())
    )
    return {
        "version": row.version,
        "sha256": row.digest.hex(),
        "devices": len(row.members),
        "prototypes": row.prototypes,
        "trained_s": row.trained_s,
        "metrics": dict(row.metrics),
        "held_out": {**held_out, "devices": len(evaluations)},
    }


def _expected(summary: dict[str, Any]) -> str:
    wanted = summary["retrain_after"] if summary["heads"] else summary["quorum"]
    closes = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary["closes_s"]))
    return f"next head: once {wanted} submissions wait for it, or at {closes}"


def show(summary: dict[str, Any], console: "Console") -> None:
    """Print a report for a person."""
    from rich.markup import escape
    from rich.table import Table

    running = "running" if summary["running"] else "not running"
    console.print(
        f"fleet [bold]{summary['fleet']}[/], {summary['algorithm']}, task {summary['task'][:12]}, {running}",
        highlight=False,
    )
    devices = Table(box=None, padding=(0, 2, 0, 0))
    devices.add_column("device", overflow="fold")
    devices.add_column("state", no_wrap=True)
    for name in ("pictures", "classes", "prototypes", "bytes"):
        devices.add_column(name, justify="right", no_wrap=True)
    devices.add_column("held-out\naccuracy", no_wrap=True)
    for row in summary["devices"]:
        accuracy = (
            "" if row["accuracy"] is None else f"{row['accuracy']:.1%} of {row['right'] + row['wrong']}"
        )
        cells = (row["pictures"], row["classes"], row["prototypes"], row["bytes"])
        devices.add_row(row["device"], row["state"], *map(str, cells), accuracy)
    console.print(devices)
    bare = [name for name, covered in summary["coverage"].items() if not covered["prototypes"]]
    covered = len(summary["classes"]) - len(bare)
    console.print(
        f"{summary['submissions']} submissions, {summary['waiting']} not in a head yet; {covered} of "
        f"{len(summary['classes'])} classes covered"
        + (f", none of: {escape(', '.join(bare[:10]))}{' …' if len(bare) > 10 else ''}" if bare else ""),
        highlight=False,
    )
    if summary["closes_s"] is not None and not summary["training"]:
        console.print(_expected(summary), highlight=False)
    if summary["training"]:
        figures = summary["training"]
        console.print(
            f"training head {figures['version']}: epoch {figures.get('epoch', 0)} of {figures.get('epochs', '?')}"
        )
    for head in summary["heads"][-5:]:
        held_out = head["held_out"]
        accuracy = (
            "" if held_out["accuracy"] is None else f", {held_out['accuracy']:.1%} right on held-out pictures"
        )
        console.print(
            f"head {head['version']}: {head['prototypes']} prototypes of {head['devices']} devices{accuracy}",
            highlight=False,
        )
    for refusal in summary["refusals"]:
        console.print(
            f"[yellow]refused[/] {refusal['count']} x {refusal['reason']} from {refusal['device']}: ",
            highlight=False,
            end="",
        )
        console.print(refusal["detail"], markup=False, highlight=False)
    if summary["head_path"]:
        console.print(f"newest: {summary['head_path']}", markup=False, highlight=False, soft_wrap=True)
