"""The rows that a status is made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aggregator.coordination import rollout_state
from aggregator.coordination.collection import Collection
from aggregator.coordination.round_state import DeviceDecisions
from aggregator.heads.head_rate import limited_until_s
from aggregator.storage.devices import DeviceRecord
from aggregator.storage.heads import HeadRecord
from aggregator.storage.keys import Key
from aggregator.storage.store import Store
from aggregator.storage.stored_values import ServedTask
from aggregator.storage.submissions import SubmissionRecord
from protocol.wire.messages import Evaluation


@dataclass(frozen=True)
class Rows:
    """The rows of a fleet and of the task that is served, and what several parts of a status derive from them."""

    store: Store
    served: ServedTask
    is_running: bool
    submissions: Mapping[str, SubmissionRecord]
    """By device."""
    counting: Mapping[str, SubmissionRecord]
    """The submissions that the next head would be made of."""
    collection: Collection
    decisions: DeviceDecisions
    devices: Mapping[str, DeviceRecord]
    keys: Mapping[str, Key]
    """By device."""
    heads: Sequence[HeadRecord]
    """Oldest first."""
    planned: HeadRecord | None
    """The head that is planned or trained now."""
    rollout: rollout_state.State
    rate_limited_until_s: float | None
    """The time (unix seconds) of the next training if too many were started lately."""
    evaluations: Mapping[int, Mapping[str, Evaluation]]
    """Of the current head, of the candidate and of those that devices use: by version, then by device."""
    covered: frozenset[int]
    """Classes that have prototypes."""

    def evaluations_of(self, version: int) -> Mapping[str, Evaluation]:
        """Return the evaluations of a head, which are read again if the head is in no use."""
        kept = self.evaluations.get(version)
        return kept if kept is not None else self.store.evaluations.of_head(self.served.digest, version)


def read_rows(store: Store) -> Rows:
    """Read the rows; raises StateError if no aggregator has run on this state yet."""
    served = store.served_task()
    task = served.digest
    heads, rollout = store.heads.all(task), store.heads.rollout(task)
    submissions, counted = store.submissions.all(task), store.submissions_of(task, served.settings)
    version, up_to = (heads[-1].version, heads[-1].up_to) if heads else (0, 0)
    devices = {record.device: record for record in store.devices.all()}
    in_use = {rollout.current, rollout.trial.version if rollout.trial else 0}
    in_use |= {record.info.head_version for record in devices.values() if record.info is not None}
    return Rows(
        store,
        served,
        is_running=store.database.is_locked(),
        submissions=submissions,
        counting={device: submissions[device] for device in counted.members(version)},
        collection=counted.read(version, up_to),
        decisions=store.decisions(task),
        devices=devices,
        keys=store.keys.all(),
        heads=heads,
        planned=store.heads.planned(task),
        rollout=rollout,
        rate_limited_until_s=limited_until_s(store, task, served.limits),
        evaluations={
            head.version: store.evaluations.of_head(task, head.version)
            for head in heads
            if head.version in in_use
        },
        covered=frozenset(label for record in submissions.values() for label in record.per_class),
    )
