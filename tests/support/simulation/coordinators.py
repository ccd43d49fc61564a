"""A coordinator without trainings, for the messages of devices."""

from dataclasses import dataclass, field

from aggregator.coordination.round_state import Entry, Settings
from aggregator.coordination.rounds import SubmissionVerdict, judged
from aggregator.storage.submissions import SubmissionRecord
from protocol.wire.messages import Evaluation


@dataclass(kw_only=True)
class FixedCoordinator:
    """Implements `Coordinator`: its rounds and heads are what a test says, and submissions are in memory."""

    settings: Settings
    newest_head: int = 0
    retained_heads: frozenset[int] = frozenset()
    served: frozenset[bytes] = frozenset()
    entries: dict[str, Entry] = field(default_factory=dict)
    evaluated: list[tuple[str, int]] = field(default_factory=list)
    repeated: int = 0
    """Requests to repeat the round."""

    def prepare(self, digest: bytes, payload: bytes) -> None:
        """Do nothing."""

    def submit(self, record: SubmissionRecord, payload: bytes) -> SubmissionVerdict:
        """Judge a submission, and keep the entry of one that counts."""
        assert record.size_bytes == len(payload)
        counted = self.entries.get(record.device)
        verdict = judged(record.entry, counted, head_version=self.newest_head, settings=self.settings)
        if verdict.verdict == "new" and verdict.counted_entry is not None:
            self.entries[record.device] = verdict.counted_entry
        return verdict

    def evaluate(self, device: str, evaluation: Evaluation) -> None:
        """Note the evaluation."""
        self.evaluated.append((device, evaluation.head_version))

    def repeat_round(self) -> None:
        """Count the request."""
        self.repeated += 1
