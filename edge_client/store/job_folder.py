"""A job's folder, with what the service gives it and what it leaves, and the messages on its pipe.

A job never writes the state. `job.json` has all that it reads of it, but for keys, which are in no file, and blobs,
which it reads where they are. It leaves files and, at last, `result.json`; the service commits them in one transaction.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from edge_client.core.state import UploadItem
from edge_client.store.image_group_record import Partition
from edge_client.store.privacy_ledger import Release
from edge_client.store.stored_values import SubmissionReport
from protocol.wire.messages import HeadRef, Privacy

JOB_FILE, IMAGES_FILE, RESULT_FILE = "job.json", "images.json", "result.json"

ITEM = "item"
"""File of the submission or evaluation that a job leaves."""

LAST_SUBMISSION = "last-submission"
"""File of the newest submission, which some jobs need again."""

CHECKPOINTS = "checkpoints"
"""Folder of the state directory: a round's checkpoint outlives its job, until the round's submission is stored."""

EXTRACTING = "extracting features"
"""Label of the progress that `edge-client status` shows."""

BLOBS = "blobs"
"""Folder of the blobs that a job leaves, by their digests."""


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a device that jobs need; see `config.Settings`."""

    fleet: str
    device_id: str
    data: bytes
    holdout: float
    provider: Literal["auto", "cpu", "cuda", "tensorrt"]
    threads: int | None
    batch_size: int
    second_operator: bytes | None
    min_devices: int | None
    pinned_backbones: tuple[bytes, ...]
    variable_time: bool
    max_images: int | None
    privacy_unit: Literal["image", "person"] | None
    upload_period_s: float | None


class ListedImage(msgspec.Struct, frozen=True, array_like=True):
    """An image file as the service has found it; see `images.images.LabeledImage`."""

    relative: bytes
    label: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    person: str = ""


class ImageList(msgspec.Struct, frozen=True, kw_only=True):
    """The image files that a job may read: it never looks for others, because a privacy charge is for these.

    See `images.image_scanner.Scan`.
    """

    folder: bytes = b""
    images: tuple[ListedImage, ...] = ()
    problem: str = ""
    being_written: tuple[bytes, ...] = ()
    unknown: tuple[str, ...] = ()
    unknown_names: tuple[bytes, ...] = ()
    skipped: Mapping[str, int] = {}


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The device's state as a job reads it.

    Args:
        number: a free sequence number.
        facts: stored facts by their names, as JSON.
        last: the newest submission in the outbox.
        partition: the groups of images.
        now_s: elapsed time of the state directory.
    """

    number: int
    facts: Mapping[str, msgspec.Raw]
    last: UploadItem | None
    partition: Partition
    now_s: float


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of the device's state by a job.

    Args:
        facts: new facts by their names, as JSON.
        partition: the groups of images; None if they stay.
        item: a new item for the outbox, whose bytes are in the file ITEM.
        blobs: digests of new blobs, which are in the folder BLOBS.
    """

    facts: Mapping[str, msgspec.Raw] = {}
    partition: Partition | None = None
    item: UploadItem | None = None
    blobs: tuple[bytes, ...] = ()


class JobVersion(msgspec.Struct, frozen=True):
    """The part of `job.json` that every version has."""

    version: str = "an earlier version"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job: a submission to build, or a head to install.

    Args:
        version: of the program that has written it; one of another version cannot run it.
        requires_privacy: the device takes part in tasks with differential privacy only.
        manifest, round: encoded as on the wire; `round` is empty in a task without rounds.
        above: the sequence number that a submission must exceed; 0 for none.
        deaths: ends of jobs while they ran something, by its digest in hex, since it last worked.
        suspects: identities of images that were being decoded when a job ended; it decodes each by itself first.
        guilty: identities of images at which jobs ended, with the memory that those might use, bytes.
    """

    kind: Literal["build", "install"]
    version: str
    settings: JobSettings
    requires_privacy: bool
    task: bytes
    manifest: bytes
    round: bytes = b""
    head: HeadRef | None = None
    as_canary: bool = False
    above: int = 0
    is_dry_run: bool = False
    state: Snapshot
    deaths: Mapping[str, int]
    suspects: tuple[bytes, ...] = ()
    guilty: Mapping[bytes, int] = {}


class Problem(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why a job has no result.

    `lost` is a blob to download again, `space` the bytes that `folder` lacks; otherwise the program ends with the text.
    """

    text: str
    lost: bytes = b""
    folder: bytes = b""
    space: int = 0


class Built(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The result of a build; see `core.events.SubmissionBuilt`.

    `item` is new, or the one in the outbox, which counts for this task. `report` is of the submission that was made;
    with `awaits_block` the earlier one, `item`, stays in its place.
    """

    item: UploadItem | None
    reason: str = ""
    may_pass: bool = False
    no_images: bool = False
    retries: bool = False
    report: SubmissionReport | None = None
    awaits_block: bool = False


class Installed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The result of an installation; see `core.events.HeadInstalled`."""

    head: bytes
    report: UploadItem | None = None
    reason: str = ""


class Message(msgspec.Struct, frozen=True, tag=True):
    """A message between service and job."""


class Line(Message, frozen=True):
    """A log record; `fields` are those of an event."""

    logger: str
    level: int
    message: str
    fields: Mapping[str, str | int | float | bool | None] | None = None


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """The upload that a dry run shows: `rows` of `size` values each, `tensors` by their shapes and bytes.

    Of a block, `means` and `directions` are the rows. The job took `seconds`, and at most `memory_bytes` so far.
    """

    report: SubmissionReport
    rows: int
    size: int
    tensors: Mapping[str, tuple[tuple[int, ...], int]]
    size_bytes: int
    privacy: Privacy | None = None
    block_images: int = 0
    means: int = 0
    directions: int = 0
    seconds: float = 0.0
    memory_bytes: int = 0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A job's result: its outcome, and the changes of the state, which are committed together, and then logged."""

    outcome: Built | Installed | Problem
    changes: Changes = Changes()
    shown: Shown | None = None
    line: Line | None = None


class Run(Message, frozen=True):
    """Run the job in a folder; `secret` is that of the device, or empty where the job needs none."""

    folder: bytes
    secret: bytes = b""


class Grant(Message, frozen=True):
    """The answer to a charge: the release, whose key is gone if its submission was uploaded, and its cost.

    `signing_key` is the device's, which seals a mask, and `choice_key` that by which images are chosen.
    """

    release: Release
    privacy: Privacy
    signing_key: bytes = b""
    choice_key: bytes = b""


class Denial(Message, frozen=True):
    """The answer to a charge that is not made; `problem` is one of the disk, else the submission is refused."""

    text: str
    problem: Problem | None = None
    has_failed: bool = False


class Ready(Message, frozen=True):
    """The libraries are loaded, or why they are not."""

    problem: str = ""


class At(Message, frozen=True):
    """The job runs this from now on, or nothing: if it ends, this is to blame.

    Args:
        what: digest of graphs or a head.
        decoding: identities of images.
        memory_bytes: what the job may use.
    """

    what: bytes = b""
    decoding: tuple[bytes, ...] = ()
    memory_bytes: int = 0


class Worked(Message, frozen=True):
    """Something has worked, or its results are on disk: earlier deaths do not count."""

    what: bytes


class Decoded(Message, frozen=True):
    """A suspect was decoded."""

    image: bytes


class Doing(Message, frozen=True):
    """Progress with its speed, if that is known; `total` 0 ends it."""

    label: str
    done: int = 0
    total: int = 0
    per_s: float = 0.0


class Charge(Message, frozen=True):
    """The request to charge a release of the listed images, with digests of their labels and names.

    With the digest of their features, `content`, the request to bind the release to them.
    """

    labels: bytes
    names: bytes
    content: bytes | None = None


class Finished(Message, frozen=True):
    """`result.json` is on disk; with a problem of the job's folder it is not."""

    problem: Problem | None = None


ToJob = Run | Grant | Denial
FromJob = Ready | At | Worked | Decoded | Doing | Line | Charge | Finished
