"""Metrics for Prometheus, from a snapshot. No label has a device's name: devices can be many and make up names."""

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from aggregator.http.snapshots import Snapshot
from aggregator.status.model import Quota, Quotas, Status
from protocol.wire.messages import DRIFT_LIMIT

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

LATELY_S = 600.0
"""Seconds for which a device with a refused message counts as one."""

DEVICE_STATES = ("online", "offline", "stopped", "unknown", "enrolled", "not enrolled", "revoked")


def metrics_text(snapshot: Snapshot) -> bytes:
    """Return a snapshot as text of the exposition format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(snapshot))
    return generate_latest(registry)


class _Metrics:
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        status = self._snapshot.status
        for family in self._families(status):
            if status is not None:
                family.samples = [
                    sample._replace(labels={"fleet": status.fleet, **sample.labels})
                    for sample in family.samples
                ]
            yield family

    def _families(self, status: Status | None) -> Iterable[Metric]:
        yield _gauge("state_readable", "1 if the state directory can be read.", float(status is not None))
        if status is not None:
            yield _gauge(
                "snapshot_timestamp_seconds", "Time at which these figures were read.", self._snapshot.made_s
            )
            yield from _of_aggregator(status)
            yield from _of_refusals(status, now_s=self._snapshot.made_s)
            yield from _of_devices(status)
            yield from _of_collection(status)
            yield from _of_heads(status)
            yield from _of_quotas(status)


def _gauge(name: str, text: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(f"protofleet_{name}", text)
    if value is not None:
        family.add_metric([], value)
    return family


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"protofleet_{name}", text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


def _counted(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"protofleet_{name}", text, labels=[label])
    for each, value in sorted(values.items()):
        family.add_metric([each], value)
    return family


def _of_aggregator(status: Status) -> Iterable[Metric]:
    info = {"fleet": status.fleet, "algorithm": status.algorithm, "task": status.task}
    yield InfoMetricFamily("protofleet_task", "The task that is served.", info)
    yield _gauge("aggregator_running", "1 if `aggregator run` is running.", status.running)
    stopped = status.intake.stopped_s is not None
    yield _gauge("intake_stopped", "1 if uploads cannot be stored.", stopped)
    yield _gauge(
        "duplicate_aggregator", "1 if another aggregator uses this key.", status.duplicate is not None
    )
    yield _gauge(
        "lost_files", "Files that devices or trainings need and that are lost.", len(status.lost_files)
    )


def _of_refusals(status: Status, *, now_s: float) -> Iterable[Metric]:
    """Yield sums, which one device can raise, and numbers of devices, which it cannot."""
    refused = Counter(status.earlier_refusals)
    for refusal in status.refusals:
        refused[refusal.reason] += refusal.count
    yield _counted("refused_messages", "Messages of devices that were refused, by reason.", "reason", refused)
    lately = Counter(each.reason for each in status.refusals if now_s - each.last_s < LATELY_S)
    text = "Devices of which a message was refused in the last ten minutes, by reason."
    yield _labelled("devices_refused", text, "reason", dict(sorted(lately.items())))
    by_devices: Counter[str] = Counter()
    for device in status.devices:
        by_devices.update(device.refused_messages)
    text = (
        "Messages that devices have refused since their start, by reason; at most a million of each device."
    )
    yield _labelled("device_refused_messages", text, "reason", dict(sorted(by_devices.items())))
    refusing = Counter(reason for device in status.devices for reason in device.refused_messages)
    text = "Devices that have refused messages since their start, by reason."
    yield _labelled("devices_refusing", text, "reason", dict(sorted(refusing.items())))


def _of_devices(status: Status) -> Iterable[Metric]:
    states = dict.fromkeys(DEVICE_STATES, 0.0)
    for device in status.devices:
        states[device.state] = states.get(device.state, 0.0) + 1
    yield _labelled("devices", "Known devices, by state.", "state", states)
    problems = sum(bool(device.problem) for device in status.devices)
    yield _gauge("devices_with_problem", "Devices that do not take part, with a reason.", problems)
    refused = sum(bool(device.head_problem) for device in status.devices)
    yield _gauge("devices_without_head", "Devices that cannot use the published head.", refused)
    drifts = [device.drift for device in status.devices if device.drift is not None]
    yield _gauge("device_drift_max", "Greatest drift that a device reports.", max(drifts, default=None))
    drifting = sum(drift > DRIFT_LIMIT for drift in drifts)
    yield _gauge("devices_with_drift", f"Devices that report a drift above {DRIFT_LIMIT}.", drifting)
    quarantined = sum(each.released_s is None for each in status.quarantine)
    yield _gauge("devices_quarantined", "Devices whose prototypes are not trained on.", quarantined)
    known = status.enrollment
    keys = {"enrolled": known.enrolled, "first_use": known.first_use, "revoked": known.revoked}
    yield _labelled("device_keys", "Known keys of devices, by kind.", "kind", keys)
    spent = [device.epsilon for device in status.devices if device.epsilon is not None]
    yield _gauge(
        "device_epsilon_max", "Greatest total epsilon that a device has reported.", max(spent, default=None)
    )
    text = "Devices that have spent 90 % of the task's `max_epsilon` or more."
    nearly = status.privacy.nearly_spent if status.privacy is not None else None
    yield _gauge("devices_with_epsilon_nearly_spent", text, nearly)


def _of_collection(status: Status) -> Iterable[Metric]:
    yield _gauge("submissions", "Devices whose submission is stored.", status.submissions)
    yield _gauge("submissions_waiting", "Submissions that are in no head yet.", status.waiting)
    yield _gauge("submissions_lost", "Submissions that the disk has lost.", len(status.lost_submissions))
    size_bytes = sum(device.bytes for device in status.devices)
    yield _gauge("submissions_bytes", "Size of the stored submissions.", size_bytes)
    yield _gauge("quorum_devices", "Devices that the first head waits for.", status.quorum)
    yield _gauge("classes", "Classes of the task.", len(status.classes))
    covered = sum(bool(each.devices) for each in status.coverage.values())
    yield _gauge("classes_covered", "Classes of which a device has submitted prototypes.", covered)
    text = "When the open collection or round closes at the latest."
    yield _gauge("collection_closes_timestamp_seconds", text, status.closes_at_s)
    asked_s = status.sums.requested_s if status.sums and not status.sums.problem else None
    text = "When the sum that the second operator has neither opened nor refused was requested."
    yield _gauge("sum_requested_timestamp_seconds", text, asked_s)
    refused = bool(status.sums and status.sums.problem)
    yield _gauge("sum_refused", "1 if the second operator has refused the requested sum.", refused)
    if status.round is not None:
        yield _gauge("round", "Number of the open round.", status.round.number)
        yield _gauge("rounds", "Rounds of the task.", status.round.rounds)
        yield _gauge(
            "round_devices", "Devices that have submitted for the open round.", len(status.round.devices)
        )


def _of_heads(status: Status) -> Iterable[Metric]:
    newest = status.heads[-1] if status.heads else None
    candidate = status.rollout.candidate
    versions = {
        "newest": newest.version if newest else 0,
        "current": status.rollout.current,
        "candidate": candidate.version if candidate else 0,
    }
    yield _labelled("head_version", "Versions of heads; 0 if there is none.", "head", versions)
    text = "When the newest head was trained."
    yield _gauge("head_trained_timestamp_seconds", text, newest.trained_s if newest else None)
    figures = newest.metrics if newest else {}
    yield _gauge("head_images", "Images that the newest head's devices state.", figures.get("images"))
    text = "Images that count in the newest head."
    yield _gauge("head_counted_images", text, figures.get("counted_images"))
    rejected = sum(head.state == "rejected" for head in status.heads)
    yield _gauge("heads_rejected", "Stored heads that were rejected.", rejected)
    yield _gauge("training_running", "1 while a head is trained.", status.training is not None)
    failed = status.failed_training
    yield _gauge("training_failures", "Failed trainings of the next head.", failed.failures if failed else 0)
    current = next((head for head in status.heads if head.version == status.rollout.current), None)
    held_out = current.held_out if current else None
    text = "Accuracy of the current head on all held-out images."
    yield _gauge("head_accuracy_ratio", text, held_out.accuracy if held_out else None)
    text = "Accuracy of the current head, each class alike."
    yield _gauge("head_balanced_accuracy_ratio", text, held_out.balanced if held_out else None)
    text = "Devices that have evaluated the current head."
    yield _gauge("head_evaluations", text, held_out.devices if held_out else 0)


def _of_quotas(status: Status) -> Iterable[Metric]:
    quotas: dict[str, Quota] = {name: getattr(status.quotas, name) for name in Quotas.__struct_fields__}
    limits = {name: quota.limit for name, quota in quotas.items() if quota.limit is not None}
    used = {name: quota.used for name, quota in quotas.items()}
    yield _labelled("quota_used", "What the fleet uses of what its task file can limit.", "quota", used)
    yield _labelled("quota_limit", "Quotas of the task file.", "quota", limits)
