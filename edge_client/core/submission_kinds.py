"""The kinds of submissions that tasks ask for; `edge_client.kinds` has a function for each that makes one."""

from dataclasses import dataclass

from protocol.wire.messages import TaskManifest


@dataclass(frozen=True, kw_only=True)
class SubmissionKind:
    """A kind of submissions.

    Args:
        is_private: everything that leaves the device is noisy or constant. A release is charged before an image is
            read; no image influences another one's features, is held out, or is tried again for the same release.
        in_rounds: trained from a round's tensors, once for each round; the graphs need the memory of the backbones.
        filters_outliers: the task's outlier filter selects the images of a class.
        has_blocks: principal prototypes of a block may replace prototypes of batches.
        is_quantized: prototypes are uploaded in one byte a value.
    """

    name: str
    is_private: bool = False
    in_rounds: bool = False
    filters_outliers: bool = True
    has_blocks: bool = False
    is_quantized: bool = False

    @property
    def is_grouped(self) -> bool:
        """True if whole groups of images are released, dealt by the device's secret."""
        return not self.is_private


PROTOTYPES = SubmissionKind(name="prototypes", has_blocks=True, is_quantized=True)
"""Prototypes of batches, and principal prototypes."""

GROUPS = SubmissionKind(name="groups")
"""Rows of the features of groups of images, which the task's graph maps."""

SUMS = SubmissionKind(name="sums")
"""Class sums and second moment of the mapped features of single images."""

PRIVATE_SUMS = SubmissionKind(name="private sums", is_private=True)
"""Such sums with noise, and with a mask if the task has a second operator."""

ROUNDS = SubmissionKind(name="rounds", in_rounds=True, filters_outliers=False)
"""Prototypes and changes of a round's tensors, of local training."""


def kind_of(task: TaskManifest) -> SubmissionKind:
    """Return the kind of a task's submissions; `privacy.policy.check_task` refuses mixtures."""
    if task.differential_privacy is not None:
        return PRIVATE_SUMS
    if task.program is not None:
        return ROUNDS
    if task.statistics is None:
        return PROTOTYPES
    return GROUPS if max(task.batch_size, task.min_images) > 1 else SUMS
