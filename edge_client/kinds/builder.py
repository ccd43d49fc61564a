"""Builds a device's submission for a task or a round, and puts it into the outbox."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from edge_client.core.events import BuildSubmission
from edge_client.core.state import UploadItem
from edge_client.core.submission_kinds import GROUPS, PROTOTYPES, ROUNDS, SUMS, SubmissionKind, kind_of
from edge_client.images.images import NoImages
from edge_client.kinds.image_features import FoundImages, Workspace
from edge_client.kinds.image_grouping import Grouping, group_images
from edge_client.kinds.prepared_submission import (
    NoPrototype,
    PreparedSubmission,
    encode_submission,
    make_prototypes,
)
from edge_client.kinds.private_submission import make_private_sums
from edge_client.kinds.round_submission import existing_submission, make_round, put_model
from edge_client.kinds.statistics_submission import make_groups, make_sums
from edge_client.privacy.policy import FAILED, check_task
from edge_client.store.disk_space import require_space
from edge_client.store.job_folder import Built, Line, Result
from edge_client.store.job_state import JobState
from edge_client.store.stored_values import StoredLocalModel, SubmissionSequence, TaskSubmissions
from edge_client.training.trainer import Diverged
from protocol.cli import plain
from protocol.errors import (
    BackboneMismatch,
    ConfigError,
    GraphRefused,
    PrivacyFailed,
    PrivacyRefused,
    ProtofleetError,
    StateError,
)
from protocol.log import event
from protocol.wire.codec import digest_of

log = logging.getLogger(__name__)

MAX_TASKS = 16
"""Tasks without rounds of which the newest submission's number and digest are stored."""

_MAY_PASS = (BackboneMismatch, Diverged, GraphRefused, NoImages, NoPrototype, PrivacyRefused)
"""Errors that the next round or task, or more images, can correct."""

Make = Callable[[Workspace, BuildSubmission, FoundImages, Grouping], PreparedSubmission]
"""Makes a submission of released images, whose features are cached; raises NoPrototype if none is released."""

MAKE: Mapping[SubmissionKind, Make] = {
    PROTOTYPES: make_prototypes,
    GROUPS: make_groups,
    SUMS: make_sums,
    ROUNDS: make_round,
}
"""The grouped kinds; private sums are charged before an image is read, see `make_private_sums`."""


def build_submission(workspace: Workspace, build: BuildSubmission) -> Result:
    """Build a submission; the result has the item in the outbox, or the reason why there is none.

    A dry run shows what would be sent, and leaves nothing.

    Raises:
        StateError: the disk fails.
    """
    settings, manifest = workspace.settings, build.manifest
    try:
        check_task(
            manifest,
            requires_privacy=workspace.requires_privacy,
            second_operator=settings.second_operator,
            pinned_backbones=settings.pinned_backbones,
            limits_files=settings.max_images is not None,
            privacy_unit=settings.privacy_unit,
        )
        if (item := _earlier_submission(workspace, build)) is not None:
            return Result(outcome=Built(item=item))
        if workspace.culprits.suspects and kind_of(manifest).is_grouped:  # else decoded after the charge
            # Outside `run_task`: the task is not to blame for an image.
            workspace.decode_suspects(workspace.find_images(manifest).images)
        with workspace.run_task(manifest):
            return _build(workspace, build)
    except StateError:
        raise
    except ProtofleetError as error:
        return Result(outcome=_refused(error))


def _earlier_submission(workspace: Workspace, build: BuildSubmission) -> UploadItem | None:
    """Return the submission that counts whatever the images: to a round, or to a second operator's task."""
    if build.round is not None:
        return existing_submission(workspace, build)
    last = _last_submission(workspace, build)
    if build.manifest.second_operator is None or build.above or last is None:
        return None
    with contextlib.suppress(ConfigError):
        workspace.forget_deleted(build.manifest, workspace.find_images(build.manifest))
    return last


def _last_submission(workspace: Workspace, build: BuildSubmission) -> UploadItem | None:
    """Return the last submission, if it is to the same task; a dry run has none."""
    last = workspace.store.last
    return None if workspace.dry_run or last is None or last.task != build.task else last


def _build(workspace: Workspace, build: BuildSubmission) -> Result:
    kind = kind_of(build.manifest)
    if not kind.is_grouped:
        return _leave(workspace, build, make_private_sums(workspace, build))
    if not workspace.store.secret:  # without it, anybody could deal the images as it does
        raise PrivacyFailed(FAILED)
    found = workspace.extract(build.manifest)
    grouping = group_images(workspace, build.manifest, found)
    leave_groups(workspace, grouping)
    retries = found.may_pass or grouping.is_incomplete
    is_kept = grouping.awaits_block and build.round is None and not build.above
    last = _last_submission(workspace, build) if is_kept else None  # it counts while a block awaits an image
    try:
        prepared = MAKE[kind](workspace, build, found, grouping)
    except NoPrototype as error:
        if last is None:
            return Result(outcome=_refused(error, retries=retries))
        return Result(outcome=Built(item=last, awaits_block=True, retries=retries))
    if last is not None:
        report = prepared.report(last.size_bytes)
        return Result(outcome=Built(item=last, report=report, awaits_block=True, retries=retries))
    return _leave(workspace, build, prepared, retries=retries)


def _leave(
    workspace: Workspace, build: BuildSubmission, prepared: PreparedSubmission, *, retries: bool = False
) -> Result:
    """Leave a submission for the outbox, or show it; an equal one that is there already stays."""
    store, last = workspace.store, workspace.store.last

    def encoded(sequence: int) -> bytes:
        return encode_submission(
            prepared,
            task=build.task,
            manifest=build.manifest,
            round_number=0 if build.round is None else build.round.number,
            sequence=sequence,
        )

    about = prepared.fingerprint if build.round is None else str(build.round.number)
    valid_for = {build.task, *(build.manifest.continues or ())}
    line = shown = None
    if workspace.dry_run:
        payload = encoded(int(time.time()))  # all of today take the same number of bytes
        shown = prepared.shown(len(payload))
        item = UploadItem(digest_of(payload), len(payload), "submission", build.task)
    elif last is not None and last.task in valid_for and last.about == about and not build.above:
        item = replace(last, task=build.task)
    else:
        payload, fact = _numbered(store, build, prepared, encoded)
        item = store.leave("submission", payload, task=build.task, about=about)
        store.set(fact)
        line = _line(build, prepared, item)
    built = Built(item=item, report=prepared.report(item.size_bytes), retries=retries)
    return Result(outcome=built, shown=shown, line=line)


def _numbered(
    store: JobState,
    build: BuildSubmission,
    prepared: PreparedSubmission,
    encoded: Callable[[int], bytes],
) -> tuple[bytes, StoredLocalModel | TaskSubmissions]:
    """Return the payload with its sequence number, and the fact to store with it."""
    # After a return to an earlier task an equal submission has the same number and digest: it makes no other head.
    newest = dict(store.get(TaskSubmissions).newest)
    sequence, digest = newest.pop(build.task.hex(), (0, ""))
    if sequence <= build.above or digest_of(payload := encoded(sequence)).hex() != digest:
        sequence = store.number
        store.set(SubmissionSequence(sequence))
        payload = encoded(sequence)
    if build.round is not None:
        return payload, put_model(store, build.task, prepared.local_model)
    newest = dict([*newest.items()][1 - MAX_TASKS :])
    return payload, TaskSubmissions({**newest, build.task.hex(): (sequence, digest_of(payload).hex())})


def leave_groups(workspace: Workspace, grouping: Grouping) -> None:
    """Leave the groups, and the files of new blocks, for the state; a dry run leaves nothing.

    Raises:
        StateError: the disk fails, or has too little space.
    """
    store = workspace.store
    if not workspace.dry_run:
        for content in grouping.files:
            require_space(store.folder, len(content), what="the coefficients of a block")
            store.blobs.put(content)
        store.partition = grouping.partition
    for each in grouping.lost:
        text = "block dissolved into batches"
        event(log, logging.WARNING, text, images=len(each.members), reason=each.reason)


def _refused(error: ProtofleetError, *, retries: bool = False) -> Built:
    return Built(
        item=None,
        reason=plain(str(error)),
        may_pass=isinstance(error, _MAY_PASS),
        retries=retries or isinstance(error, PrivacyFailed),
        no_images=isinstance(error, NoImages),
    )


def _line(build: BuildSubmission, prepared: PreparedSubmission, item: UploadItem) -> Line:
    cost, block = prepared.privacy, prepared.block
    return Line(
        log.name,
        logging.INFO,
        "submission built",
        {
            "task": build.task.hex()[:12],
            "round": None if build.round is None else build.round.number,
            prepared.form.replace(" ", "_") + "s": len(prepared.counts),
            "block_images": None if block is None else block.images,
            "directions": None if block is None else len(block.rows),
            "images": sum(entry.images for entry in prepared.classes),
            "loss": prepared.loss,
            "epsilon": None if cost is None else cost.epsilon,
            "total_epsilon": None if cost is None else cost.total_epsilon,
            "conditional": True if prepared.mask is not None else None,
            "bytes": item.size_bytes,
        },
    )
