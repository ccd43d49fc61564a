"""The coordinator of the same process."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from aggregator.coordination.rounds import SubmissionVerdict
from aggregator.heads.published_head import Releases
from aggregator.heads.training_schedule import HeadTraining
from aggregator.service.announcements import Announcements
from aggregator.storage.submissions import SubmissionRecord
from protocol.wire.messages import Evaluation


@dataclass(frozen=True, kw_only=True)
class LocalCoordinator:
    """Implements `Coordinator` with the rounds, heads and announcements of this process."""

    training: HeadTraining
    releases: Releases
    announcements: Announcements

    @property
    def newest_head(self) -> int:
        """The version of the newest head; with rounds, also the number of the open round."""
        return self.training.state.head_version

    @property
    def retained_heads(self) -> AbstractSet[int]:
        """The versions of the heads that are current or may become current."""
        return self.releases.retained

    @property
    def served(self) -> AbstractSet[bytes]:
        """Digests of the blobs that devices may request."""
        return self.releases.served

    def prepare(self, digest: bytes, payload: bytes) -> None:
        """Do nothing: `submit` follows at once."""

    def submit(self, record: SubmissionRecord, payload: bytes) -> SubmissionVerdict:
        """Apply a submission to the open collection; raises StateError if it cannot be stored."""
        return self.training.submit(record, payload)

    def evaluate(self, device: str, evaluation: Evaluation) -> None:
        """Apply an evaluation to the rollout; raises StateError if a change cannot be stored."""
        self.releases.evaluate(device, evaluation)

    def repeat_round(self) -> None:
        """Publish the open round again, but not for each device that asks."""
        self.announcements.repeat_round()
