"""Reads the status of a fleet from the state directory."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.registry import find_algorithm
from aggregator.config.schema import Limits
from aggregator.coordination import canary_rollout, rollout_state, round_state
from aggregator.heads import operator_commands
from aggregator.heads.calibration import MIN_IMAGES
from aggregator.heads.head_rate import limited_until_s
from aggregator.intake import intake_status
from aggregator.security.key_rotation import key_certificates, root_of
from aggregator.status import model
from aggregator.status.attention import attention_of
from aggregator.status.forecast import forecasts
from aggregator.storage.devices import counts, refusal_reason
from aggregator.storage.heads import CALIBRATED_FROM, HeadRecord
from aggregator.storage.store import Store
from aggregator.storage.stored_values import (
    LostFiles,
    NextHead,
    ServedTask,
    SigningKey,
    TaskPreparation,
)
from aggregator.storage.submissions import SubmissionRecord
from aggregator.storage.sum_lists import SumLists, devices_of, sums_of
from aggregator.storage.usage import FLEET
from protocol.cli import counted
from protocol.errors import ConfigError
from protocol.statistics.balanced_accuracy import balanced_accuracy
from protocol.storage.blobstore import file_digest
from protocol.storage.elapsed_clock import ElapsedClock
from protocol.wire.messages import MAX_CONFUSED, Evaluation, Reason
from protocol.wire.presence import Duplicate

_REFUSED: Mapping[Reason | None, str] = {"revoked": "revoked", "unknown_device": "not enrolled"}
"""State of a device whose presence messages are refused."""


def collect_status(store: Store) -> model.Status:
    """Return the status of a fleet; raises StateError if no aggregator has run on this state yet."""
    with store.database.snapshot():
        status = _collect(store)
    return replace(status, attention=attention_of(status))


def _privacy(served: ServedTask, devices: Iterable[model.Device]) -> model.Privacy | None:
    if (budget := served.privacy.dp) is None:
        return None
    spent = [device.epsilon for device in devices if device.epsilon is not None]
    return model.Privacy(
        epsilon=budget.epsilon,
        max_epsilon=budget.max_epsilon,
        delta=budget.delta,
        spent=max(spent, default=None),
        nearly_spent=sum(each >= model.NEARLY * budget.max_epsilon for each in spent),
    )


def _sums(served: ServedTask, lists: SumLists, submitted: Collection[str]) -> model.Sums | None:
    operator, settings = served.second_operator, served.privacy.sums
    if operator is None or settings is None:
        return None
    pending = lists.pending
    return model.Sums(
        min_devices=operator.min_devices,
        tolerance=settings.tolerance,
        seal_key=operator.seal_key.hex(),
        sign_key=operator.sign_key.hex(),
        lists=lists.count,
        devices=lists.summed,
        left_out=len(lists.devices) - lists.summed,
        requested=len(pending.members) if pending else 0,
        requested_s=pending.requested_s if pending and not pending.masks else None,
        waiting=len(set(submitted) - devices_of(lists)),
        problem=pending.problem if pending else "",
        left_out_reason=lists.problem,
    )


def _is_personal(algorithm: str) -> bool:
    """Return whether each device has a head of its own; False if the algorithm is no longer installed."""
    try:
        kind = find_algorithm(algorithm)
    except ConfigError:
        return False
    return issubclass(kind, RoundAlgorithm) and bool(kind.persistent)


def _collect(store: Store) -> model.Status:
    served = store.served_task()
    task, settings = served.digest, served.settings
    submissions, state, used = store.submissions.all(task), store.round_state(task), store.heads.rollout(task)
    heads = store.heads.all(task)
    used_records = [record for device, record in submissions.items() if state.decisions.counts(device)]
    known = {label for record in submissions.values() for label in record.per_class}
    is_personal = _is_personal(served.algorithm)
    following = store.next_head(task, state.head_version + 1)
    closes_s = round_state.closes_at_s(state, settings)
    key, files = store.facts.get(SigningKey), _current_files(store.folder, heads, used.current)
    is_running, preparation = store.database.is_locked(), store.facts.get(TaskPreparation)
    devices = tuple(_devices(store, task, submissions, used, known if is_personal else ()))
    return model.Status(
        attention=(),
        running=is_running,
        leader=store.database.leader(),
        intake=intake_status.read(store.folder, is_running=is_running),
        aggregator_key=key.public if key is not None else "",
        root_key=root_of(key_certificates(store.folder, bytes.fromhex(key.public))).hex() if key else "",
        duplicate=store.facts.get(Duplicate),
        enrollment=model.Enrollment(closed=store.keys.is_closed(), **counts(store.keys.all().values())),
        fleet=served.fleet,
        algorithm=served.algorithm,
        task=task.hex(),
        preparing=preparation.algorithm if is_running and preparation is not None else "",
        classes=served.classes,
        counted="images" if served.counts_images else "prototypes",
        quorum=settings.quorum,
        retrain_after=settings.retrain_after,
        training=following.progress,
        failed_training=_failed_training(store, following),
        submissions=len(submissions),
        lost_submissions=tuple(store.submissions.lost(task)),
        lost_files=lost.digests if (lost := store.facts.get(LostFiles)) is not None else (),
        waiting=len(round_state.waiting(state, settings)),
        closes_at_s=None if closes_s is None else store.clock.unix_s(closes_s),
        rate_limited_until_s=limited_until_s(store, task, served.limits),
        collection_problem=_collection_problem(state, settings),
        quotas=_quotas(store, served.limits),
        privacy=_privacy(served, devices),
        sums=_sums(served, sums_of(store.facts, task), round_state.counting(state, settings)),
        round=_round(state, settings),
        rollout=_rollout(
            used,
            served.rollout,
            store.clock,
            requested=operator_commands.commanded_version(store, task),
        ),
        devices=devices,
        coverage=_coverage(served.classes, used_records),
        quarantine=tuple(store.quarantine.all(task).values()),
        forgotten=tuple(store.forgotten.all(task)),
        heads=tuple(
            _head(store, task, head, used, known, served.classes, is_personal=is_personal) for head in heads
        ),
        forecast=tuple(
            forecasts(
                served.classes,
                _held_out(_usable(store.evaluations.of_head(task, used.current)), served.classes),
            )
        ),
        refusals=tuple(store.refusals.all()),
        earlier_refusals=store.refusals.earlier(),
        head_path=files.get("head.onnx"),
        model_path=files.get("model.onnx"),
    )


def _current_files(folder: Path, heads: Iterable[HeadRecord], current: int) -> dict[str, str]:
    """Return the paths of the current head's files; none until they are written."""
    head, model = folder / "head.onnx", folder / "model.onnx"
    if not head.is_file() or file_digest(head) not in [
        each.file for each in heads if each.version == current
    ]:
        return {}
    return {path.name: str(path.resolve()) for path in (head, model) if path.is_file()}


def _failed_training(store: Store, failed: NextHead) -> model.FailedTraining | None:
    if not failed.failures:
        return None
    return model.FailedTraining(
        version=failed.version,
        failures=failed.failures,
        reason=failed.reason,
        failed_s=failed.failed_s,
        retry_at_s=store.clock.unix_s(failed.retry_s),
    )


def _collection_problem(state: round_state.State, settings: round_state.Settings) -> str:
    enrolled, wanted = state.decisions.enrolled, round_state.wanted_devices(state, settings)
    if enrolled is None or len(enrolled) >= wanted or round_state.is_over(state.head_version, settings):
        return ""
    name = "retrain_after" if state.head_version and settings.rounds is None else "quorum"
    known = f"{counted(len(enrolled), 'device')} {'is' if len(enrolled) == 1 else 'are'} enrolled"
    return f"{name} {wanted} cannot be reached: {known}; enroll more or lower {name}"


def _quotas(store: Store, limits: Limits) -> model.Quotas:
    hourly = limits.uploads_per_hour
    uploads = 0 if hourly is None else store.usages.of(FLEET, now_s=store.clock.now_s()).submissions
    return model.Quotas(
        devices=model.Quota(used=store.keys.valid(), limit=limits.max_devices),
        storage_bytes=model.Quota(used=store.submissions.stored_bytes(), limit=limits.max_storage_bytes),
        uploads=model.Quota(used=uploads, limit=hourly),
    )


def _round(state: round_state.State, settings: round_state.Settings) -> model.Round | None:
    if settings.rounds is None:
        return None
    current = round_state.waiting(state, settings)
    return model.Round(
        number=state.head_version,
        rounds=settings.rounds,
        over=round_state.is_over(state.head_version, settings),
        min_devices=settings.min_devices,
        devices=tuple(sorted(current)),
        carried=tuple(sorted(round_state.counting(state, settings).keys() - current.keys())),
    )


def _rollout(
    state: rollout_state.State,
    settings: rollout_state.Settings,
    clock: ElapsedClock,
    *,
    requested: int | None,
) -> model.Rollout:
    trial, candidate = state.trial, None
    if trial is not None:
        candidate = model.Candidate(
            version=trial.version,
            canaries=trial.canaries,
            awaited=trial.awaited,
            since_s=clock.unix_s(trial.since_s),
            summary=canary_rollout.summary_of(trial, settings),
        )
    return model.Rollout(current=state.current, candidate=candidate, requested=requested)


def _devices(
    store: Store,
    task: bytes,
    submissions: Mapping[str, SubmissionRecord],
    used: rollout_state.State,
    balanced_over: Collection[int],
) -> Iterable[model.Device]:
    known = {record.device: record for record in store.devices.all()}
    in_use = {device: record.info.head_version for device, record in known.items() if record.info is not None}
    versions = {used.newest, used.current, *in_use.values()}
    evaluations = {version: store.evaluations.of_head(task, version) for version in versions}
    keys, is_closed, epsilons = store.keys.all(), store.keys.is_closed(), store.devices.epsilons()
    enrolled = {device for device, key in keys.items() if key.enrolled and key.revoked_s is None}
    for device in sorted(known.keys() | submissions.keys() | enrolled):
        record, submission, head = known.get(device), submissions.get(device), in_use.get(device, 0)
        info = record.info if record is not None else None
        state = record.state if record else "enrolled" if device in enrolled else "unknown"
        evaluation = evaluations[head or used.current].get(device)
        yield model.Device(
            device=device,
            state=_REFUSED.get(refusal_reason(keys.get(device), is_closed=is_closed), state),
            seen_s=record.seen_s if record else None,
            runtime=info.runtime if info else None,
            problem=info.problem if info else "",
            warning=info.warning if info else "",
            refused_messages=info.refused_messages if info else {},
            drift=info.drift if info and info.drift is not UNSET else None,
            images=sum(info.images.values()) if info else 0,
            round=submission.entry.round if submission else None,
            classes=len(submission.per_class) if submission else 0,
            prototypes=submission.prototypes if submission else 0,
            bytes=submission.size_bytes if submission else 0,
            head=head,
            head_problem=_head_problem(evaluations, device, used),
            epsilon=epsilons.get(device),
            **_accuracy([evaluation] if evaluation else []),
            balanced=_balanced([evaluation], balanced_over) if evaluation else None,
        )


def _head_problem(
    evaluations: Mapping[int, Mapping[str, Evaluation]], device: str, used: rollout_state.State
) -> str:
    versions = [used.trial.version] if used.trial else []
    found = [evaluations[version].get(device) for version in (*versions, used.current)]
    return next((one.problem for one in found if one is not None and one.problem), "")


def _usable(evaluations: Mapping[str, Evaluation]) -> list[Evaluation]:
    return [one for one in evaluations.values() if not one.problem]


def _accuracy(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """Return the fields of `Accuracy`, pooled over evaluations."""
    correct = sum(sum(one.correct) for one in evaluations)
    incorrect = sum(sum(one.incorrect) for one in evaluations)
    accuracy = correct / (correct + incorrect) if correct + incorrect else None
    gains = [
        one.correct_with_prior - sum(one.correct)
        for one in evaluations
        if one.correct_with_prior is not UNSET
    ]
    with_prior = (correct + sum(gains)) / (correct + incorrect) if gains and accuracy is not None else None
    return {"correct": correct, "incorrect": incorrect, "accuracy": accuracy, "with_prior": with_prior}


def _coverage(classes: Iterable[str], submissions: Iterable[SubmissionRecord]) -> dict[str, model.Coverage]:
    records = list(submissions)
    return {
        name: model.Coverage(
            prototypes=sum(record.per_class.get(label, 0) for record in records),
            devices=sum(label in record.per_class for record in records),
        )
        for label, name in enumerate(classes)
    }


def _balanced(evaluations: Sequence[Evaluation], classes: Collection[int]) -> float | None:
    """Return the accuracy over these classes alike, pooled over evaluations."""
    correct = {label: sum(one.correct[label] for one in evaluations) for label in classes}
    incorrect = {label: sum(one.incorrect[label] for one in evaluations) for label in classes}
    return balanced_accuracy(correct, incorrect, classes)


def _balanced_of_head(
    evaluations: Sequence[Evaluation], known: Collection[int], *, is_personal: bool
) -> float | None:
    """Return a head's accuracy over all known classes: the mean over personal models, or that of the fleet's model.

    Of the fleet's model, classes without any held-out images do not count.
    """
    if not is_personal:
        seen = {
            label for label in known if any(one.correct[label] + one.incorrect[label] for one in evaluations)
        }
        return _balanced(evaluations, seen)
    every = (_balanced([evaluation], known) for evaluation in evaluations)
    found = [each for each in every if each is not None]
    return fmean(found) if found else None


def _head(
    store: Store,
    task: bytes,
    head: HeadRecord,
    used: rollout_state.State,
    known: Collection[int],
    classes: Sequence[str],
    *,
    is_personal: bool,
) -> model.Head:
    evaluations = _usable(store.evaluations.of_head(task, head.version))
    return model.Head(
        version=head.version,
        sha256=head.digest.hex(),
        devices=head.devices,
        prototypes=head.prototypes,
        trained_s=head.trained_s,
        metrics=dict(head.metrics),
        state=_head_state(head.version, used),
        reason=used.rejected.get(head.version, ""),
        warning=head.warning,
        limited=head.limited,
        held_out=model.HeldOut(
            **_accuracy(evaluations),
            balanced=_balanced_of_head(evaluations, known, is_personal=is_personal),
            devices=len(evaluations),
            missing=_missing(evaluations, head),
            confused=_confused(evaluations, classes) if head.version == used.current else (),
        ),
    )


def _missing(evaluations: Sequence[Evaluation], head: HeadRecord) -> int:
    """Return how many held-out images a head with novelty lacks for its threshold."""
    if CALIBRATED_FROM in head.metrics or all(one.novelty_images is UNSET for one in evaluations):
        return 0
    return max(0, MIN_IMAGES - sum(sum(one.correct) + sum(one.incorrect) for one in evaluations))


def _confused(evaluations: Sequence[Evaluation], classes: Sequence[str]) -> tuple[model.Confusion, ...]:
    """Return the pairs of classes that devices have confused, pooled, at most MAX_CONFUSED."""
    pairs: Counter[tuple[int, int]] = Counter()
    for one in evaluations:
        for pair in one.confused or ():
            pairs[pair.label, pair.predicted] += pair.images
    return tuple(
        model.Confusion(
            label=classes[label],
            predicted=classes[predicted],
            images=images,
            of=sum(one.correct[label] + one.incorrect[label] for one in evaluations),
        )
        for (label, predicted), images in pairs.most_common(MAX_CONFUSED)
    )


def _held_out(evaluations: Sequence[Evaluation], classes: Sequence[str]) -> list[tuple[int, int]]:
    """Return the correct and incorrect held-out images of each class, pooled."""
    return [
        (sum(one.correct[label] for one in evaluations), sum(one.incorrect[label] for one in evaluations))
        for label in range(len(classes))
    ]


def _head_state(version: int, used: rollout_state.State) -> model.HeadState:
    if used.trial is not None and version == used.trial.version:
        return "candidate"
    if version in used.rejected:
        return "rejected"
    return "current" if version == used.current else ""
