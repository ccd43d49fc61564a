"""What `aggregator status` shows, read from the state directory of a running or stopped aggregator.

`--json` prints what `report` returns:
`running, intake: {stopped_s, reason}, key, keys: {closed, enrolled, first_use, revoked}, fleet, algorithm, task,
classes, quorum, retrain_after, training, submissions, waiting, closes_s, round: {number, min_devices, rounds, over,
devices, carried}, rollout: {current, candidate: {version, canaries, awaited, since_s, figures}, ordered}, devices:
[device, state, seen_s, runtime, problem, refusals, images, round, classes, prototypes, bytes, head, head_problem,
epsilon, right, wrong, accuracy], coverage: {class: {prototypes, devices}}, quarantined: [device, why, since_s,
readmitted_s], heads: [version, sha256, devices, prototypes, trained_s, metrics, state, why, held_out: {right, wrong,
accuracy, devices}], refusals: [device, reason, count, detail], head_path, model_path`.

In `intake`, `stopped_s` is since when nothing can be stored, for the reason beside it; null if all is well. `key` is
the aggregator's public key, in hex: what devices are given as `--aggregator-key`. In `keys`, `closed` says whether
only enrolled devices are heard; beside it, how many were enrolled, are known by the first key that came, and revoked.
`round` is null for a task without rounds. In it, `devices` are those that have uploaded for the open round, and
`carried` those whose submission for an earlier one still counts. `closes_s` is when the round, or the collection,
closes at the latest as things stand. `current` is 0 if there is no head, and `candidate` null if none is tried; its
`figures` are of the canaries that are not `awaited`. `ordered` is the head that an operator's order will make current
which the aggregator has not taken yet, or null. A device's `refusals` are what it was told and did not believe, by
reason. Its `state` is what it last said of itself, or `revoked` or `not enrolled`, or
`enrolled` if nothing was heard of it yet. Its `head` is the one it uses, or 0,
and its accuracy is that head's; `head_problem` is why it does not use the one that it is told to, and `epsilon` the
most that it has said to have spent on differential privacy, of whatever tasks, or null. A head's `state` is `current`,
`candidate`, `rejected`, for which `why` says why, or empty. `readmitted_s` is null, or since when
a device that was quarantined is trained on all the same.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from aggregator.coordination import rollout, rounds
from aggregator.heads import operator_commands
from aggregator.ingest import intake_status
from aggregator.storage.device_keys import counts, refusal_reason
from aggregator.storage.facts import SigningKey, TrainingProgress
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from protocol.cli import plain
from protocol.wire.messages import Evaluation, Reason

if TYPE_CHECKING:
    from rich.console import Console


def report(store: Store) -> dict[str, Any]:
    """Everything worth knowing, as JSON values; times are unix seconds.

    Raises:
        StateError: no aggregator has run on this state yet.
    """
    served = store.served_task()
    task, settings = served.digest, served.settings
    submissions = store.submissions.all(task)
    used = store.heads.rollout(task)
    heads = [_head(store, task, row, used) for row in store.heads.all(task)]
    state = store.round_state(task)
    model = store.folder / "model.onnx"
    return {
        "running": store.is_locked(),
        "intake": _intake(store),
        "key": key.public if (key := store.facts.get(SigningKey)) is not None else "",
        "keys": {"closed": store.keys.is_closed(), **counts(store.keys.all().values())},
        "fleet": served.fleet,
        "algorithm": served.algorithm,
        "task": task.hex(),
        "classes": list(served.classes),
        "quorum": settings.quorum,
        "retrain_after": settings.retrain_after,
        "training": _training(store),
        "submissions": len(submissions),
        "waiting": len(rounds.waiting(state, settings)),
        "closes_s": rounds.closes_at_s(state, settings),
        "round": _round(state, settings),
        "rollout": {**_rollout(used), "ordered": operator_commands.ordered(store, task)},
        "devices": _devices(store, task, submissions, used),
        "coverage": _coverage(served.classes, submissions.values()),
        "quarantined": _set_aside(store, task),
        "heads": heads,
        "refusals": [
            {"device": device, "reason": reason, "count": count, "detail": detail}
            for device, reason, count, detail in store.refusals.all()
        ],
        "head_path": str((store.folder / "head.onnx").resolve()) if heads else None,
        "model_path": str(model.resolve()) if heads and model.is_file() else None,
    }


def _training(store: Store) -> dict[str, Any] | None:
    progress = store.facts.get(TrainingProgress)
    return None if progress is None else {"version": progress.version, **progress.figures}


def _intake(store: Store) -> dict[str, Any]:
    stopped = intake_status.read(store.folder)
    return {
        "stopped_s": stopped.since_s if stopped else None,
        "reason": stopped.reason if stopped else "",
    }


def _round(state: rounds.State, settings: rounds.Settings) -> dict[str, Any] | None:
    if settings.rounds is None:
        return None
    here = rounds.waiting(state, settings)
    carried = rounds.counting(state, settings).keys() - here.keys()
    return {
        "number": state.head_version,
        "min_devices": settings.min_devices,
        "rounds": settings.rounds,
        "over": rounds.is_over(state, settings),
        "devices": sorted(here),
        "carried": sorted(carried),
    }


def _rollout(state: rollout.State) -> dict[str, Any]:
    trial = state.trial
    if trial is None:
        return {"current": state.current, "candidate": None}
    candidate = {
        "version": trial.version,
        "canaries": list(trial.canaries),
        "awaited": list(trial.awaited),
        "since_s": trial.since_s,
        "figures": rollout.summary_of(trial),
    }
    return {"current": state.current, "candidate": candidate}


def _held_out(right: Iterable[int], wrong: Iterable[int]) -> dict[str, Any]:
    correct, missed = sum(right), sum(wrong)
    accuracy = correct / (correct + missed) if correct + missed else None
    return {"correct": correct, "incorrect": missed, "accuracy": accuracy}


_UNHEARD: dict[Reason | None, str] = {"revoked": "revoked", "unknown_device": "not enrolled"}
"""What is shown of a device whose presence is not heard any more."""


def _devices(
    store: Store, task: bytes, submissions: dict[str, SubmissionRecord], used: rollout.State
) -> list[dict[str, Any]]:
    known = {record.device: record for record in store.devices.all()}
    heads = {device: record.info.head_version for device, record in known.items() if record.info is not None}
    versions = {used.newest, used.current, *heads.values()}
    said = {version: store.evaluations.of_head(task, version) for version in versions}
    keys, is_closed = store.keys.all(), store.keys.is_closed()
    epsilons = store.devices.epsilons()
    rows = []
    enrolled = {device for device, key in keys.items() if key.enrolled and key.revoked_s is None}
    for device in sorted(known.keys() | submissions.keys() | enrolled):
        unseen = "enrolled" if device in enrolled else "unknown"
        record = known.get(device)
        info = record.info if record is not None else None
        refused = refusal_reason(keys.get(device), is_closed=is_closed)
        row = submissions.get(device)
        head = heads.get(device, 0)
        of_head = said[head or used.current].get(device)
        rows.append(
            {
                "device": device,
                "state": _UNHEARD.get(refused, record.state if record else unseen),
                "seen_s": record.seen_s if record else None,
                "runtime": info.runtime if info else None,
                "problem": info.problem if info else "",
                "refusals": info.refused_messages if info else {},
                "images": sum(info.images.values()) if info else 0,
                "round": row.entry.round if row else None,
                "classes": len(row.per_class) if row else 0,
                "prototypes": row.prototypes if row else 0,
                "bytes": row.size_bytes if row else 0,
                "head": head,
                "head_problem": _head_problem(said, device, used),
                "epsilon": epsilons.get(device),
                **(_held_out(of_head.correct, of_head.incorrect) if of_head else _held_out([], [])),
            }
        )
    return rows


def _head_problem(said: dict[int, dict[str, Evaluation]], device: str, used: rollout.State) -> str:
    versions = [used.trial.version] if used.trial else []
    evaluations = [said[version][device] for version in (*versions, used.current) if device in said[version]]
    return next((one.problem for one in evaluations if one.problem), "")


def _set_aside(store: Store, task: bytes) -> list[dict[str, Any]]:
    return [
        {"device": device, "why": one.reason, "since_s": one.since_s, "readmitted_s": one.released_s}
        for device, one in store.quarantine.all(task).items()
    ]


def _coverage(classes: Iterable[str], submissions: Iterable[SubmissionRecord]) -> dict[str, dict[str, int]]:
    rows = list(submissions)
    return {
        name: {
            "prototypes": sum(row.per_class.get(label, 0) for row in rows),
            "devices": sum(label in row.per_class for row in rows),
        }
        for label, name in enumerate(classes)
    }


def _head(store: Store, task: bytes, row: HeadRecord, used: rollout.State) -> dict[str, Any]:
    said = [one for one in store.evaluations.of_head(task, row.version).values() if not one.problem]
    held_out = _held_out((sum(one.correct) for one in said), (sum(one.incorrect) for one in said))
    states = {used.current: "current", **dict.fromkeys(used.rejected, "rejected")}
    if used.trial is not None:
        states[used.trial.version] = "candidate"
    return {
        "version": row.version,
        "sha256": row.digest.hex(),
        "devices": len(row.members),
        "prototypes": row.prototypes,
        "trained_s": row.trained_s,
        "metrics": dict(row.metrics),
        "state": states.get(row.version, ""),
        "why": used.rejected.get(row.version, ""),
        "held_out": {**held_out, "devices": len(said)},
    }


def show(summary: dict[str, Any], console: "Console") -> None:
    """Print a report for a person."""
    summary = _plain(summary)
    running = "running" if summary["running"] else "not running"
    console.print(
        f"fleet [bold]{summary['fleet']}[/], {summary['algorithm']}, task {summary['task'][:12]}, {running}",
        highlight=False,
    )
    _show_keys(summary, console)
    if summary["intake"]["stopped_s"] is not None:
        since = _clock(summary["intake"]["stopped_s"])
        console.print(f"[red]intake: stopped[/] since {since}: ", highlight=False, end="")
        console.print(summary["intake"]["reason"], markup=False, highlight=False, soft_wrap=True)
    _show_devices(summary["devices"], console)
    _show_coverage(summary, console)
    _show_what_comes(summary, console)
    for head in summary["heads"][-5:]:
        held_out = head["held_out"]
        accuracy = (
            "" if held_out["accuracy"] is None else f", {held_out['accuracy']:.1%} right on held-out images"
        )
        state = f" ({head['state']})" if head["state"] else ""
        console.print(
            f"head {head['version']}{state}: {head['prototypes']} prototypes of {head['devices']} devices{accuracy}",
            highlight=False,
        )
        if head["why"]:
            console.print(f"  {head['why']}", markup=False, highlight=False, soft_wrap=True)
    _show_candidate(summary["rollout"]["candidate"], console)
    for one in summary["quarantined"]:
        readmitted = one["readmitted_s"] is not None
        what = "readmitted" if readmitted else "[yellow]quarantined[/]"
        since = _clock(one["readmitted_s"] if readmitted else one["since_s"])
        console.print(f"{what} {one['device']}, since {since}: ", highlight=False, end="")
        console.print(one["why"], markup=False, highlight=False)
    if (ordered := summary["rollout"]["ordered"]) is not None:
        when = "soon" if summary["running"] else "when the aggregator is started"
        console.print(f"head {ordered} will be current {when}: an operator's order waits", highlight=False)
    for refusal in summary["refusals"]:
        console.print(
            f"[yellow]refused[/] {refusal['count']} x {refusal['reason']} from {refusal['device']}: ",
            highlight=False,
            end="",
        )
        console.print(refusal["detail"], markup=False, highlight=False)
    if summary["head_path"]:
        console.print(f"current: {summary['head_path']}", markup=False, highlight=False, soft_wrap=True)


def _plain(value: Any) -> Any:
    """JSON values with every text in them made `plain`: much of it is what devices say."""
    match value:
        case str():
            return plain(value)
        case list():
            return [_plain(each) for each in value]
        case dict():
            return {plain(key): _plain(each) for key, each in value.items()}
    return value


def _show_keys(summary: dict[str, Any], console: "Console") -> None:
    keys = summary["keys"]
    known = f"closed, {keys['enrolled']} enrolled"
    if not keys["closed"]:
        known = f"open to every device, {keys['first_use']} known by the first key that came"
    revoked = f", {keys['revoked']} revoked" if keys["revoked"] else ""
    console.print(f"key {summary['key']}; {known}{revoked}", highlight=False, soft_wrap=True)


def _show_candidate(candidate: dict[str, Any] | None, console: "Console") -> None:
    """Print what a head waits for that some devices try."""
    if candidate is None:
        return
    version, count = candidate["version"], len(candidate["canaries"])
    line = f"head {version} waits for devices that are online, to try it"
    if count:
        tried = f"head {version} is tried by {rollout.canaries(count)}: {candidate['figures']}"
        line = f"{tried}; it waits for {_some(candidate['awaited'])}"
    console.print(line, markup=False, highlight=False)


def _show_devices(rows: list[dict[str, Any]], console: "Console") -> None:
    from rich.table import Table

    devices = Table(box=None, padding=(0, 1, 0, 0))
    devices.add_column("device", overflow="fold")
    devices.add_column("state", no_wrap=True)
    for name in ("images", "classes", "prototypes", "bytes"):
        devices.add_column(name, justify="right", no_wrap=True)
    private = any(row["epsilon"] is not None for row in rows)
    if private:
        devices.add_column("epsilon", justify="right", no_wrap=True)
    devices.add_column("head", justify="right", no_wrap=True)
    devices.add_column("held-out\naccuracy", no_wrap=True)
    for row in rows:
        accuracy = (
            "" if row["accuracy"] is None else f"{row['accuracy']:.1%} of {row['correct'] + row['incorrect']}"
        )
        # Under differential privacy nobody but the device knows how many images it has.
        images = row["images"] if row["epsilon"] is None else ""
        cells = [images, row["classes"], row["prototypes"], row["bytes"]]
        if private:
            cells.append("" if row["epsilon"] is None else f"{row['epsilon']:.2f}")
        cells.append(row["head"] or "")
        devices.add_row(row["device"], row["state"], *map(str, cells), accuracy)
    console.print(devices)
    for row in rows:
        if row["problem"]:
            console.print(f"[yellow]problem[/] of {row['device']}: ", highlight=False, end="")
            console.print(row["problem"], markup=False, highlight=False)
        if row["refusals"]:
            told = ", ".join(f"{count} x {reason}" for reason, count in sorted(row["refusals"].items()))
            console.print(f"[yellow]not believed[/] by {row['device']}: {told}", highlight=False)
        if row["head_problem"]:
            console.print(f"[yellow]head not used[/] by {row['device']}: ", highlight=False, end="")
            console.print(row["head_problem"], markup=False, highlight=False)


def _show_coverage(summary: dict[str, Any], console: "Console") -> None:
    from rich.markup import escape

    bare = [name for name, covered in summary["coverage"].items() if not covered["prototypes"]]
    covered = len(summary["classes"]) - len(bare)
    console.print(
        f"{summary['submissions']} submissions, {summary['waiting']} not in a head yet; {covered} of "
        f"{len(summary['classes'])} classes covered" + (f", none of: {escape(_some(bare))}" if bare else ""),
        highlight=False,
    )


def _show_what_comes(summary: dict[str, Any], console: "Console") -> None:
    """Print what is being done, or what the next head waits for."""
    closes_s, training, number = summary["closes_s"], summary["training"], summary["round"]
    closes = "" if closes_s is None else _clock(closes_s)
    if number is not None:
        console.print(_round_line(number, closes), highlight=False)
    elif training:
        console.print(
            f"training head {training['version']}: epoch {training.get('epoch', 0)} of {training.get('epochs', '?')}"
        )
    elif closes:
        wanted = summary["retrain_after"] if summary["heads"] else summary["quorum"]
        console.print(f"next head: once {wanted} submissions wait for it, or at {closes}", highlight=False)


def _round_line(number: dict[str, Any], closes: str) -> str:
    if number["over"]:
        return f"all {number['rounds']} rounds are over"
    here = _some(number["devices"]) or "nobody yet"
    carried = f"; from earlier rounds: {_some(number['carried'])}" if number["carried"] else ""
    waits = f"; it waits for {number['min_devices']} devices" if number["devices"] else ""
    until = f"; it closes at {closes} or before" if closes else waits
    return f"round {number['number']} of {number['rounds']} is open, uploaded: {here}{carried}{until}"


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def _some(names: list[str]) -> str:
    """The first ten of them."""
    return ", ".join(names[:10]) + (" …" if len(names) > 10 else "")
