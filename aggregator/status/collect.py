"""Reads the status of a fleet from the state directory."""

import math
from collections import Counter

from msgspec.structs import replace

from aggregator.coordination import canary_rollout, round_state
from aggregator.coordination.collection import closes_at_s, wanted_devices
from aggregator.status import model
from aggregator.status.attention import attention_of
from aggregator.status.devices import devices_of
from aggregator.status.forecast import Forecast, forecasts
from aggregator.status.heads import NO_RESULT, Head, heads_of
from aggregator.status.privacy import privacy_of, second_operator_of
from aggregator.status.rows import Rows, read_rows
from aggregator.storage import stop_reason
from aggregator.storage.keys import counts
from aggregator.storage.store import Store
from aggregator.storage.stored_values import LostFiles, SigningKey, TaskPreparation
from aggregator.storage.usage import FLEET
from protocol.cli import counted
from protocol.storage.blobstore import file_digest
from protocol.wire.presence import Duplicate


def collect_status(store: Store) -> model.Status:
    """Return the status of a fleet; raises StateError if no aggregator has run on this state yet."""
    with store.database.snapshot():
        status = _status(read_rows(store))
    return replace(status, attention=attention_of(status))


def _status(rows: Rows) -> model.Status:
    store, served = rows.store, rows.served
    settings, task = served.settings, served.digest
    devices, heads, files = tuple(devices_of(rows)), heads_of(rows), _current_files(rows)
    key = store.facts.get(SigningKey) or SigningKey("")
    return model.Status(
        attention=(),
        running=rows.is_running,
        leader=store.database.leader(),
        intake=stop_reason.read(store.folder, is_running=rows.is_running),
        aggregator_key=key.public,
        root_key=key.root,
        duplicate=store.facts.get(Duplicate),
        enrollment=_enrollment(rows),
        fleet=served.fleet,
        algorithm=served.algorithm,
        task=task.hex(),
        preparing=_preparing(rows),
        classes=served.classes,
        counted="images" if served.counts_images else "prototypes",
        quorum=settings.quorum,
        retrain_after=settings.retrain_after,
        training=rows.planned.progress if rows.is_running and rows.planned is not None else None,
        failed_training=_failed_training(rows),
        submissions=len(rows.submissions),
        lost_submissions=tuple(store.submissions.lost(task)),
        lost_files=(store.facts.get(LostFiles) or LostFiles(())).digests,
        waiting=rows.collection.count,
        closes_at_s=_closes_at_s(rows),
        rate_limited_until_s=rows.rate_limited_until_s,
        collection_problem=_collection_problem(rows),
        quotas=_quotas(rows),
        privacy=privacy_of(rows, devices),
        sums=second_operator_of(rows),
        round=_round(rows),
        rollout=_rollout(rows),
        devices=devices,
        coverage=_coverage(rows),
        quarantine=tuple(store.quarantine.all(task).values()),
        forgotten=tuple(store.forgotten.all(task)),
        heads=heads,
        forecast=_forecast(served.classes, heads),
        refusals=tuple(store.refusals.all()),
        earlier_refusals=store.refusals.earlier(),
        head_path=files.get("head.onnx"),
        model_path=files.get("model.onnx"),
    )


def _enrollment(rows: Rows) -> model.Enrollment:
    return model.Enrollment(closed=rows.store.keys.is_closed(), **counts(rows.keys.values()))


def _preparing(rows: Rows) -> str:
    preparation = rows.store.facts.get(TaskPreparation)
    return preparation.algorithm if rows.is_running and preparation is not None else ""


def _failed_training(rows: Rows) -> model.FailedTraining | None:
    failed = rows.planned
    if failed is None or not failed.failures:
        return None
    return model.FailedTraining(
        version=failed.version,
        failures=failed.failures,
        reason=failed.problem,
        failed_s=failed.failed_s,
        retry_at_s=rows.store.clock.unix_s(failed.retry_s),
    )


def _closes_at_s(rows: Rows) -> float | None:
    closes_s = closes_at_s(rows.collection, rows.served.settings)
    return None if math.isinf(closes_s) else rows.store.clock.unix_s(closes_s)


def _collection_problem(rows: Rows) -> str:
    settings, version, enrolled = rows.served.settings, rows.collection.version, rows.decisions.enrolled
    wanted = wanted_devices(version, settings)
    if enrolled is None or len(enrolled) >= wanted or round_state.is_over(version, settings):
        return ""
    name = "retrain_after" if version and settings.rounds is None else "quorum"
    known = f"{counted(len(enrolled), 'device')} {'is' if len(enrolled) == 1 else 'are'} enrolled"
    return f"{name} {wanted} cannot be reached: {known}; enroll more or lower {name}"


def _quotas(rows: Rows) -> model.Quotas:
    store, limits = rows.store, rows.served.limits
    hourly = limits.uploads_per_hour
    uploads = 0 if hourly is None else store.usages.of(FLEET, now_s=store.clock.now_s()).submissions
    return model.Quotas(
        devices=model.Quota(used=store.keys.valid(), limit=limits.max_devices),
        storage_bytes=model.Quota(used=store.submissions.stored_bytes(), limit=limits.max_storage_bytes),
        uploads=model.Quota(used=uploads, limit=hourly),
    )


def _round(rows: Rows) -> model.Round | None:
    settings, version = rows.served.settings, rows.collection.version
    if settings.rounds is None:
        return None
    is_over = round_state.is_over(version, settings)
    counting = {} if is_over else rows.counting
    current = {device for device, record in counting.items() if record.entry.round == version}
    return model.Round(
        number=version,
        rounds=settings.rounds,
        over=is_over,
        min_devices=settings.min_devices,
        devices=tuple(sorted(current)),
        carried=tuple(sorted(counting.keys() - current)),
    )


def _rollout(rows: Rows) -> model.Rollout:
    trial, candidate = rows.rollout.trial, None
    if trial is not None:
        candidate = model.Candidate(
            version=trial.version,
            canaries=trial.canaries,
            awaited=trial.awaited,
            since_s=rows.store.clock.unix_s(trial.since_s),
            summary=canary_rollout.summary_of(trial, rows.served.rollout),
        )
    return model.Rollout(
        newest=rows.heads[-1].version if rows.heads else 0,
        current=rows.rollout.current,
        candidate=candidate,
    )


def _coverage(rows: Rows) -> dict[str, model.Coverage]:
    prototypes, devices = Counter[int](), Counter[int]()
    for device, record in rows.submissions.items():
        if rows.decisions.counts(device):
            prototypes.update(record.per_class)
            devices.update(record.per_class.keys())
    return {
        name: model.Coverage(prototypes=prototypes[label], devices=devices[label])
        for label, name in enumerate(rows.served.classes)
    }


def _forecast(classes: tuple[str, ...], heads: tuple[Head, ...]) -> tuple[Forecast, ...]:
    results = next((head.held_out.by_class for head in heads if head.state == "current"), {})
    found = [results.get(name, NO_RESULT) for name in classes]
    return tuple(forecasts(classes, [(each.correct, each.incorrect) for each in found]))


def _current_files(rows: Rows) -> dict[str, str]:
    """Return the paths of the current head's files; none until they are written."""
    head, model_file = (rows.store.folder / name for name in ("head.onnx", "model.onnx"))
    current = [each.file for each in rows.heads if each.version == rows.rollout.current]
    if not head.is_file() or file_digest(head) not in current:
        return {}
    return {path.name: str(path.resolve()) for path in (head, model_file) if path.is_file()}
