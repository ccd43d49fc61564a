"""Metrics for Prometheus, from a snapshot. A new one is the annotation `Metric` of a field in `status/model.py`.

No label has a device's name: devices can be many and make up names.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric as Family

from aggregator.http.snapshots import Snapshot
from aggregator.status.annotations import Metric, metrics_of
from aggregator.status.model import Status

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_READABLE = Metric("state_readable", "1 if the state directory can be read.")
_MADE = Metric("snapshot_timestamp_seconds", "Time at which these figures were read.")
_TASK = Metric("task", "The task that is served.")


def metrics_text(snapshot: Snapshot) -> bytes:
    """Return a snapshot as text of the exposition format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(snapshot))
    return generate_latest(registry)


def described() -> dict[str, str]:
    """Return the help text of each metric by its name in Prometheus."""
    metrics = ((_READABLE, _READABLE.text, None), (_MADE, _MADE.text, None), *metrics_of(Status, []))
    texts = {f"{_name(metric)}{'_total' if metric.is_counter else ''}": text for metric, text, _ in metrics}
    return {**texts, f"{_name(_TASK)}_info": _TASK.text}


class _Metrics:
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        status = self._snapshot.status
        if status is None:
            yield _family(_READABLE, _READABLE.text, {"": 0.0}, {})
            return
        own = ((_READABLE, _READABLE.text, 1.0), (_MADE, _MADE.text, self._snapshot.made_s))
        found: dict[str, tuple[Metric, str, Counter[str]]] = {}
        for metric, text, samples in (*own, *metrics_of(Status, [status])):
            _, _, totals = found.setdefault(metric.name, (metric, text, Counter()))
            if samples is not None:
                totals.update(samples if isinstance(samples, Mapping) else {"": samples})
        labels = {"fleet": status.fleet}
        yield from (_family(*each, labels) for each in found.values())
        info = {**labels, "algorithm": status.algorithm, "task": status.task}
        yield InfoMetricFamily(_name(_TASK), _TASK.text, info)


def _family(metric: Metric, text: str, samples: Mapping[str, float], labels: Mapping[str, str]) -> Family:
    kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
    names = [*labels, metric.label] if metric.label else [*labels]
    family = kind(_name(metric), text, labels=names)
    for value, sample in sorted(samples.items()):
        family.add_metric([*labels.values(), value][: len(names)], float(sample))
    return family


def _name(metric: Metric) -> str:
    return f"protofleet_{metric.name}"
