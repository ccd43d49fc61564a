"""Noisy sums under differential privacy: charged before images are read; any failure uploads nothing.

Noise and mask are derived from the release's random key and from the rows that are summed: a state directory that is
restored from a copy of before can give one release two sets of rows, and their noise is independent. That release is
then charged once and made twice.
"""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from edge_client.data.images import LabeledImage
from edge_client.privacy.noise_key import KEY_BYTES, subkey
from edge_client.privacy.policy import BUDGET, FAILED, SUBMITTED
from edge_client.privacy.sum_mechanism import NoisySums, noisy_sums
from edge_client.storage.disk_space import DiskAlmostFull
from edge_client.storage.privacy_ledger import Release
from edge_client.storage.stored_values import ClassReport, PrivacySpent
from edge_client.submission.distinct_images import DistinctImages
from edge_client.submission.image_features import (
    FoundImages,
    Workspace,
    training_feature_keys,
)
from edge_client.submission.prepared_submission import PreparedSubmission
from protocol.errors import GraphRefused, Interrupted, PrivacyFailed, PrivacyRefused
from protocol.log import event
from protocol.statistics.noisy_sums import UNITS, epsilon_of_sums, share_of_noise
from protocol.statistics.public_map import PublicMap, read_map
from protocol.wire.arrays import to_array, to_tensor
from protocol.wire.codec import decode, digest_of
from protocol.wire.messages import MAX_IMAGES, DifferentialPrivacy, Privacy, Submission, TaskManifest

log = logging.getLogger(__name__)

_VERSION = b"5"
"""Version of the mechanism; changes when the same key would give other noise."""


def prepare_private(
    workspace: Workspace, task: bytes, manifest: TaskManifest, should_stop: Callable[[], bool]
) -> PreparedSubmission:
    """Return noisy sums of all images; the same images give the same release again.

    Images of equal pixels are one image, in the first of its classes. The release is charged before a backbone runs on
    any image, so that neither the answer nor its price depends on what the backbone does there. An image on which it
    fails is tried again for the next release only: a backbone that fails at some starts would otherwise cause a second
    release by that image. A dry run charges nothing.

    Raises:
        ConfigError: the images cannot be found.
        BackboneMismatch: a backbone cannot be used; it has not run on any image.
        GraphRefused: the public map cannot be used; no image was read.
        PrivacyRefused: the budget is exceeded, the submission was masked before, or any step failed; the text reveals
            nothing about images.
        Interrupted: the work is out of date.
        DiskAlmostFull: there is too little space; the release stays charged, and is the same once there is.
    """
    backbones, images = workspace.backbones(manifest), workspace.find_images(manifest)
    try:
        size = sum(each.metadata.feature_size for each in backbones)
        public = _public_map(workspace, manifest, feature_size=size)
        return _prepare(workspace, task, manifest, images, public=public, should_stop=should_stop)
    except (GraphRefused, PrivacyRefused, Interrupted, DiskAlmostFull):
        raise
    except Exception as error:
        event(log, logging.ERROR, "differential privacy failed", error=f"{type(error).__name__}: {error}")
        raise PrivacyFailed(FAILED) from error


def _public_map(workspace: Workspace, manifest: TaskManifest, *, feature_size: int) -> PublicMap:
    wanted = manifest.statistics
    if wanted is None:
        raise PrivacyFailed(FAILED)
    public = read_map(workspace.store.blobs.read(wanted.map.digest))
    if public.components.shape != (wanted.size, feature_size):
        expected, got = (wanted.size, feature_size), public.components.shape
        raise GraphRefused(f"expected a public map of shape {expected}, {wanted.map.name} has {got}")
    return public


def _prepare(
    workspace: Workspace,
    task: bytes,
    manifest: TaskManifest,
    images: tuple[LabeledImage, ...],
    *,
    public: PublicMap,
    should_stop: Callable[[], bool],
) -> PreparedSubmission:
    wanted, secret = manifest.differential_privacy, workspace.secret(manifest)
    operator = manifest.second_operator
    if wanted is None or len(secret) != KEY_BYTES:
        raise PrivacyFailed(FAILED)
    workspace.forget_deleted(manifest, images)  # also if the budget is spent
    submitted = None if workspace.dry_run else _submitted(workspace, task)
    release = _charge(
        workspace, _fingerprint(task, secret, images), wanted, is_submitted=submitted is not None
    )
    if release.content is None and not workspace.dry_run:
        workspace.cache.forget_unusable(*training_feature_keys(manifest))
    found = workspace.extract(manifest, should_stop, images)
    members = [list(by_key.values()) for by_key in DistinctImages(workspace, manifest, found).by_label()]
    content, rows = hashlib.sha256(), []
    for of_class in members:  # the features of all classes are not in memory at once
        features = workspace.features(of_class, training_feature_keys(manifest), len(public.center))
        rows.append(public.rows(features))
        # What is summed, so that the noise is never for other sums: another machine may round other rows.
        content.update(_digest_of_names(of_class) + hashlib.sha256(rows[-1].tobytes()).digest())
    release = _bind(workspace, release, content.digest(), wanted)
    if release.key is None and submitted is not None:
        return _again(manifest, found, submitted)
    key = subkey(release.key or b"", content.digest())
    sums = noisy_sums(
        np.concatenate(rows),
        np.repeat(np.arange(len(members)), list(map(len, members))),
        classes=len(members),
        noise_multiplier=wanted.noise_multiplier
        if operator is None
        else share_of_noise(wanted.noise_multiplier, honest=operator.honest),
        key=subkey(key, b"sums"),
    )
    cost = _cost(_with(workspace.store.ledger.releases(), release), wanted)
    prepared = _prepared(manifest, found, sums, cost)
    return replace(prepared, mask_key=subkey(key, b"mask")) if operator else prepared


def _submitted(workspace: Workspace, task: bytes) -> Submission | None:
    """Return the newest release's submission if it is in the outbox, intact, and was made for this task."""
    outbox, newest = workspace.store.outbox, len(workspace.store.ledger.releases())
    for item in outbox.items():
        if (item.kind, item.task) == ("submission", task) and (payload := outbox.payload(item)) is not None:
            submission = decode(payload, Submission, max_bytes=len(payload))
            if submission.privacy is not None and submission.privacy.releases == newest:
                return submission
    return None


def _again(manifest: TaskManifest, found: FoundImages, submitted: Submission) -> PreparedSubmission:
    """Return a release whose noise key is deleted, as it was submitted."""
    if submitted.mask is not UNSET:
        raise PrivacyRefused(SUBMITTED)
    counts = to_array(submitted.counts).astype(np.uint32)
    return PreparedSubmission(
        prototypes=to_array(submitted.prototypes),
        labels=to_array(submitted.labels).astype(np.uint32),
        counts=counts,
        classes=_reports(manifest, found, counts),
        unusable=found.unusable,
        tensors=submitted.tensors,
        privacy=submitted.privacy,
        form="class sum",
    )


def _prepared(
    manifest: TaskManifest, found: FoundImages, sums: NoisySums, cost: Privacy
) -> PreparedSubmission:
    """Return the submission of noisy sums, which has a row of each class, whichever classes there are."""
    counts = np.clip(sums.counts // UNITS, 1, MAX_IMAGES).astype(np.uint32)
    is_masked = manifest.second_operator is not None
    to_int32 = _wrapped if is_masked else _clipped
    return PreparedSubmission(
        prototypes=to_int32(sums.sums),
        labels=np.arange(len(counts), dtype=np.uint32),
        counts=counts,
        classes=_reports(manifest, found, counts),
        unusable=found.unusable,
        tensors={
            "counts": to_tensor(to_int32(sums.counts)),
            "second_moment": to_tensor(to_int32(sums.second_moment)),
        },
        privacy=cost,
        form="masked class sum" if is_masked else "class sum",
    )


def _wrapped(values: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return values modulo 2^32: clipped ones would have less noise in a sum."""
    return values.astype(np.int32)


def _clipped(values: NDArray[np.int64]) -> NDArray[np.int32]:
    limits = np.iinfo(np.int32)
    return np.clip(values, limits.min, limits.max).astype(np.int32)


def _reports(
    manifest: TaskManifest, found: FoundImages, counts: NDArray[np.uint32]
) -> tuple[ClassReport, ...]:
    """Return reports for the device's operator; they are not uploaded."""
    totals = [len(found.of_class(label)) for label in range(len(manifest.classes))]
    return tuple(
        ClassReport(name, total, 0, (count,))
        for name, total, count in zip(manifest.classes, totals, counts.tolist(), strict=True)
    )


def _fingerprint(task: bytes, secret: bytes, images: Sequence[LabeledImage]) -> bytes:
    """Return a digest of what determines a release before any image is read."""
    labels = ",".join(str(image.label) for image in images).encode()
    parts = (secret, labels, _digest_of_names(images))
    return digest_of(_VERSION + task + b"".join(map(digest_of, parts)))


def _digest_of_names(images: Sequence[LabeledImage]) -> bytes:
    return digest_of("\0".join(image.identity for image in images).encode(errors="surrogateescape"))


def _charge(
    workspace: Workspace, fingerprint: bytes, wanted: DifferentialPrivacy, *, is_submitted: bool
) -> Release:
    """Return the release of a fingerprint; the newest one is not charged again, but has to be within the limits.

    Without its key it is charged again if its submission is lost.
    """
    before = workspace.store.ledger.releases()
    if before and before[-1].fingerprint == fingerprint:
        newest = before[-1]
        if workspace.dry_run and newest.key is None:
            newest = msgspec.structs.replace(newest, key=os.urandom(KEY_BYTES))
        if newest.key is not None or is_submitted:
            _require_budget(workspace, before, wanted)  # the owner may have lowered the limit since
            return newest
    return _charge_new(workspace, before, fingerprint, None, wanted)


def _bind(workspace: Workspace, release: Release, content: bytes, wanted: DifferentialPrivacy) -> Release:
    """Return the release whose noise is for these features; if it was for others, a new one, which is charged."""
    if release.content == content:
        return release
    if release.content is not None:
        before = workspace.store.ledger.releases()
        return _charge_new(workspace, before, release.fingerprint, content, wanted)
    if not workspace.dry_run:
        workspace.store.ledger.bind(release.number, content)
    return msgspec.structs.replace(release, content=content)


def _charge_new(
    workspace: Workspace,
    before: tuple[Release, ...],
    fingerprint: bytes,
    content: bytes | None,
    wanted: DifferentialPrivacy,
) -> Release:
    key = os.urandom(KEY_BYTES)
    release = Release(len(before) + 1, fingerprint, wanted.noise_multiplier, key, content)
    spent = _require_budget(workspace, (*before, release), wanted)
    if not workspace.dry_run:
        workspace.store.ledger.charge(release, spent)
    return release


def _require_budget(
    workspace: Workspace, releases: tuple[Release, ...], wanted: DifferentialPrivacy
) -> PrivacySpent:
    """Return what the releases cost together; raises PrivacyRefused if it is above the task's or the owner's limit."""
    own_limit, cost = workspace.settings.max_epsilon, _cost(releases, wanted)
    limit = wanted.max_epsilon if own_limit is None else min(wanted.max_epsilon, own_limit)
    if not cost.total_epsilon <= limit:
        text = "privacy budget exceeded, nothing is uploaded"
        event(log, logging.ERROR, text, total_epsilon=cost.total_epsilon, max_epsilon=limit)
        raise PrivacyRefused(BUDGET)
    return PrivacySpent(cost.epsilon, cost.total_epsilon, cost.delta, len(releases), limit)


def _with(releases: tuple[Release, ...], release: Release) -> tuple[Release, ...]:
    """Return the recorded releases and one that a dry run has not recorded."""
    return (*releases[: release.number - 1], release)


def _cost(releases: tuple[Release, ...], wanted: DifferentialPrivacy) -> Privacy:
    multipliers = Counter(release.noise_multiplier for release in releases)
    return Privacy(
        epsilon=epsilon_of_sums({wanted.noise_multiplier: 1}, delta=wanted.delta),
        total_epsilon=epsilon_of_sums(multipliers, delta=wanted.delta),
        delta=wanted.delta,
        releases=len(releases),
    )
