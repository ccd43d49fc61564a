"""The decisions about rounds and heads that the messages of devices depend on."""

from collections.abc import Set as AbstractSet
from typing import Protocol

from aggregator.coordination.rounds import SubmissionVerdict
from aggregator.storage.submissions import SubmissionRecord
from protocol.wire.messages import Evaluation


class Coordinator(Protocol):
    """Decides about the submissions and evaluations of devices, and what they may download."""

    @property
    def newest_head(self) -> int:
        """The version of the newest head, 0 if there is none; with rounds, also the number of the open round."""
        ...

    @property
    def retained_heads(self) -> AbstractSet[int]:
        """The versions of the heads whose evaluations matter."""
        ...

    @property
    def served(self) -> AbstractSet[bytes]:
        """Digests of the blobs that devices may request."""
        ...

    def prepare(self, digest: bytes, payload: bytes) -> None:
        """Start to store a payload that was validated, before it is judged; raises StateError."""
        ...

    def submit(self, record: SubmissionRecord, payload: bytes) -> SubmissionVerdict:
        """Judge a validated submission, and store it if it counts; durable when the caller's transaction is.

        Raises StateError if it cannot be stored.
        """
        ...

    def evaluate(self, device: str, evaluation: Evaluation) -> None:
        """Apply a device's evaluation of a head; raises StateError if a change cannot be stored."""
        ...

    def repeat_round(self) -> None:
        """Publish the open round again, for a device that has seen another one."""
        ...
