"""Facts that a device keeps over a restart: one struct per fact, stored as JSON under the name of its type.

Every field has a default, which stands for a fact that was never stored.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec


class DeviceName(msgspec.Struct, frozen=True):
    """The device id."""

    value: str = ""


class Holdout(msgspec.Struct, frozen=True):
    """The fraction of each class's images that the device holds out."""

    fraction: float = 0.2


class Secret(msgspec.Struct, frozen=True):
    """32 random bytes that the shuffles and the noise are derived from."""

    key: bytes = b""


class SubmissionSequence(msgspec.Struct, frozen=True):
    """The sequence number of the newest submission."""

    number: int = 0


class TaskSubmissions(msgspec.Struct, frozen=True):
    """The newest submission to each of the last tasks without rounds."""

    newest: Mapping[str, tuple[int, str]] = {}
    """Sequence number, and digest in hex, by the task's digest in hex; the newest task is the last."""


class Epoch(msgspec.Struct, frozen=True):
    """The epoch of the newest start of the program."""

    number: int = 0


class BackboneProvider(msgspec.Struct, frozen=True):
    """The execution provider that ran the backbone last, such as `cpu` or `cuda`."""

    name: str = ""


class ClassReport(msgspec.Struct, frozen=True):
    """The prototypes of one class in a submission, with the images in each of them (`counts`).

    `images` includes those held out; `waiting` images are new, or left of prototypes that lost an image, and are
    included once there are at least `more_needed` new ones beside them, or the `missing` images of these prototypes
    have returned. `in_blocks` are images of blocks, which are in none of these prototypes. `unused` ones are in blocks
    that were left out: the task lacks a class of theirs or asks for more images of each, or an image is missing.
    """

    name: str
    images: int
    held_out: int
    counts: tuple[int, ...]
    waiting: int = 0
    more_needed: int = 0
    missing: int = 0
    in_blocks: int = 0
    unused: int = 0

    @property
    def left_out(self) -> bool:
        """True if there are training images, but too few for any prototype."""
        return self.images > self.held_out and not self.counts and not self.in_blocks


class ExtractionProgress(msgspec.Struct, frozen=True):
    """Images whose features are in the cache, of all images; 0 of 0 once all are."""

    done: int = 0
    total: int = 0
    images_per_s: float = 0.0
    """Speed of the computation, without the images that were in the cache before; 0 if it is unknown."""

    @property
    def left_s(self) -> float | None:
        """Return the estimated time until all are done; None if it is unknown."""
        return (self.total - self.done) / self.images_per_s if self.images_per_s else None


class LeftOut(msgspec.Struct, frozen=True):
    """Omissions from the data folder: unknown folders or labels, skipped files by reason, and unusable images."""

    unknown: tuple[str, ...] = ()
    skipped: Mapping[str, int] = {}
    unusable: tuple[tuple[str, str], ...] = ()
    """Paths and reasons, by the newest extraction."""


SubmissionForm = Literal["prototype", "class sum", "masked class sum", "group"]
"""A submission's rows."""


class SubmissionReport(msgspec.Struct, frozen=True):
    """Contents of the newest submission: its classes, unusable images with reasons, and size."""

    classes: tuple[ClassReport, ...] = ()
    unusable: tuple[tuple[str, str], ...] = ()
    size_bytes: int = 0
    form: SubmissionForm = "prototype"
    """The rows of which `counts` are the images, for each class."""
    warning: str = ""
    """A warning about the upload, for the device's owner; empty if there is none."""
    lost_images: str = ""
    """The classes that have lost most of their images since an earlier submission; empty if none has."""
    is_private: bool = False
    """True if it was made under differential privacy: the report has exact numbers, for the device's owner only."""
    directions: int = 0
    """Rows of all blocks."""
    moved: int = 0
    """Images of blocks that are counted in a class in which they do not lie any more."""
    dissolved: int = 0
    """Images of blocks that were dissolved."""

    @property
    def labels(self) -> dict[str, int]:
        """The labeled images of each class."""
        return {each.name: each.images for each in self.classes}


class PrivacySpent(msgspec.Struct, frozen=True):
    """Privacy loss of the newest release and of all releases together, at `delta`, and the limits of the totals.

    It is for one person of whom `images_per_person` count, or for one image where that is None. If it is
    `conditional`, it holds only if the second operator is honest; `local_epsilon` is that of all releases to both
    operators together, or None if it is unknown. `adopted` of the newest releases are from the aggregator's record:
    this state had lost them.
    """

    epsilon: float = 0.0
    total_epsilon: float = 0.0
    delta: float = 0.0
    releases: int = 0
    max_epsilon: float = 0.0
    conditional: bool = False
    local_epsilon: float | None = None
    max_local_epsilon: float | None = None
    adopted: int = 0
    images_per_person: int | None = None


class NextUpload(msgspec.Struct, frozen=True):
    """When the newest private build is published (unix seconds); 0 if at once, and past if it was."""

    at_s: float = 0.0


class DemandedUnit(msgspec.Struct, frozen=True):
    """The weakest unit of privacy that the owner accepts at this start, `image` or `person`; empty for any task."""

    value: str = ""


class StoredLocalModel(msgspec.Struct, frozen=True):
    """Digest of the blob of the local model that the rounds of a task have trained."""

    task: bytes = b""
    digest: bytes = b""


class StoredInitialModel(msgspec.Struct, frozen=True):
    """Digest of the blob of the initial model that the head is bound to on a device that has not taken part."""

    digest: bytes = b""


class InstalledHead(msgspec.Struct, frozen=True, kw_only=True):
    """A head in use.

    `head` is its file's digest. In tasks with rounds, `round` trained it, the round's `tensors` and the `local_model`
    are bound to it by their digests, and `feature_size` is that of all backbones together. Of `total` held-out images,
    `correct` were classified correctly when it was installed, and `correct_with_prior` with the prior `auto`. Of a
    personal model, `balanced` is the mean over the `known` classes, which have prototypes; those without held-out
    images count as not recognized.
    """

    head: bytes
    version: int
    task: bytes = b""
    backbones: tuple[bytes, ...]
    classes: tuple[str, ...]
    round: int | None = None
    tensors: bytes = b""
    local_model: bytes = b""
    feature_size: int = 0
    correct: int = 0
    total: int = 0
    correct_with_prior: int | None = None
    balanced: float | None = None
    known: int = 0

    @property
    def key(self) -> bytes:
        """Identifies it among the task's heads, as `core.state.head_key` does."""
        return self.tensors or self.head

    @property
    def identity(self) -> dict[str, Any]:
        """Return what predictions name it by: `head_version`, `round`, and the digests `head` (its key) and `task`."""
        digests = {"head": self.key.hex(), "task": self.task.hex()}
        return {"head_version": self.version, "round": self.round, **digests}


class Heads(msgspec.Struct, frozen=True):
    """The head in use and the one before it."""

    installed: InstalledHead | None = None
    previous: InstalledHead | None = None
