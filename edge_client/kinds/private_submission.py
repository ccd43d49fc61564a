"""Noisy sums under differential privacy: charged before images are read; any failure uploads nothing.

Noise and mask are derived from the release's random key and from the rows that are summed: a state directory that is
restored from a copy of before can give one release two sets of rows, and their noise is independent. That release is
then charged once and made twice.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from edge_client.core.events import BuildSubmission
from edge_client.images.image_scanner import Scan
from edge_client.images.images import LabeledImage
from edge_client.kinds.counted_images import counted_images, listing_of, log_unit
from edge_client.kinds.image_features import (
    FoundImages,
    Workspace,
    training_feature_keys,
)
from edge_client.kinds.prepared_submission import Mask, PreparedSubmission
from edge_client.privacy.noise_key import subkey
from edge_client.privacy.policy import FAILED, SUBMITTED, VARIABLE_TIME
from edge_client.privacy.sum_mechanism import NoisySums, noisy_sums
from edge_client.store.disk_space import DiskAlmostFull
from edge_client.store.job_folder import Charge
from edge_client.store.stored_values import ClassReport
from protocol.errors import BlobLost, GraphRefused, PrivacyFailed, PrivacyRefused
from protocol.log import event
from protocol.models.slots import mapped
from protocol.models.steady_operators import unsteady_operators
from protocol.statistics.noisy_sums import UNITS, share_of_noise
from protocol.statistics.public_map import PublicMap, read_map
from protocol.wire.arrays import to_array, to_tensor
from protocol.wire.codec import decode, digest_of
from protocol.wire.messages import MAX_IMAGES, Privacy, Submission, TaskManifest

log = logging.getLogger(__name__)

UNSTEADY = "the work of the backbone depends on images"

MAX_NAMED = 5
"""Operators that are named."""


def make_private_sums(workspace: Workspace, build: BuildSubmission) -> PreparedSubmission:
    """Return noisy sums of the images that count; the same images give the same release again.

    `counted_images` says which ones count. The release is charged before a backbone runs on
    any image, so that neither the answer nor its price depends on what the backbone does there. An image on which it
    fails is tried again for the next release only: a backbone that fails at some starts would otherwise cause a second
    release by that image. A dry run charges nothing.

    Raises:
        ConfigError: the images cannot be found.
        BackboneMismatch: a backbone cannot be used; it has not run on any image.
        GraphRefused: the public map cannot be used; no image was read.
        PrivacyRefused: the work of a backbone depends on images, the budget is exceeded, the submission was masked
            before, or any step failed; the text reveals nothing about images.
        DiskAlmostFull: there is too little space; the release stays charged, and is the same once there is.
        BlobLost: a backbone or the public map was damaged on disk; it is downloaded again.
    """
    manifest = build.manifest
    warning = _require_steady(workspace, manifest)
    backbones, scan = workspace.backbones(manifest), workspace.find_images(manifest)
    try:
        size = sum(each.metadata.feature_size for each in backbones)
        public = _public_map(workspace, manifest, feature_size=size)
        return replace(_make(workspace, build, scan, public=public), warning=warning)
    except (GraphRefused, PrivacyRefused, DiskAlmostFull, BlobLost):
        raise
    except Exception as error:
        event(log, logging.ERROR, "differential privacy failed", error=f"{type(error).__name__}: {error}")
        raise PrivacyFailed(FAILED) from error


def _require_steady(workspace: Workspace, manifest: TaskManifest) -> str:
    """Return a warning for the owner about backbones whose work depends on images, or an empty text.

    Raises:
        PrivacyRefused: there is one, and the owner has not allowed it.
    """
    warnings = []
    for blob in manifest.backbones:
        operators = unsteady_operators(mapped(workspace.store.blobs.verified_path(blob.digest)))
        if not operators:
            continue
        text = ", ".join(operators[:MAX_NAMED])
        if not workspace.settings.variable_time:
            event(log, logging.ERROR, UNSTEADY, name=blob.name, operators=text)
            raise PrivacyRefused(VARIABLE_TIME)
        warnings.append(f"{UNSTEADY} ({text}), and --variable-time allows it: time can reveal single images")
    return "; ".join(dict.fromkeys(warnings))


def _public_map(workspace: Workspace, manifest: TaskManifest, *, feature_size: int) -> PublicMap:
    wanted = manifest.statistics
    if wanted is None:
        raise PrivacyFailed(FAILED)
    public = read_map(workspace.store.blobs.read(wanted.map.digest))
    if public.components.shape != (wanted.size, feature_size):
        expected, got = (wanted.size, feature_size), public.components.shape
        raise GraphRefused(f"expected a public map of shape {expected}, {wanted.map.name} has {got}")
    return public


def _make(
    workspace: Workspace, build: BuildSubmission, scan: Scan, *, public: PublicMap
) -> PreparedSubmission:
    manifest, images = build.manifest, scan.images
    wanted, operator, charge = manifest.differential_privacy, manifest.second_operator, workspace.charge
    if wanted is None or charge is None:
        raise PrivacyFailed(FAILED)
    workspace.forget_deleted(manifest, scan)  # also if the budget is spent
    most = workspace.settings.max_images
    labels = digest_of((f"{most}:" if most else "").encode() + listing_of(images, wanted))
    listed = Charge(labels, digest_of(_digest_of_names(images)))
    charged = charge(listed)
    release = charged.release
    if release.content is None and not workspace.dry_run:
        workspace.cache.forget_unusable(*training_feature_keys(manifest))
    found = workspace.extract(manifest, scan)
    counted = counted_images(workspace, manifest, found, key=charged.choice_key)
    members = counted.by_label
    content, rows = hashlib.sha256(), []
    for of_class in members:  # the features of all classes are not in memory at once
        features = workspace.features(of_class, training_feature_keys(manifest), len(public.center))
        rows.append(public.rows(features))
        # What is summed, so that the noise is never for other sums: another machine may round other rows.
        content.update(_digest_of_names(of_class) + hashlib.sha256(rows[-1].tobytes()).digest())
    granted = charge(msgspec.structs.replace(listed, content=content.digest()))
    if granted.release.key is None:
        return _again(workspace, build, found)
    key = subkey(granted.release.key, content.digest())
    noise_multiplier = wanted.noise_multiplier
    if operator is not None:
        noise_multiplier = share_of_noise(noise_multiplier, honest=operator.honest)
    if most:  # an image may have displaced another one: the noise is that of two
        noise_multiplier *= 2
    log_unit(counted, wanted, noise_multiplier=noise_multiplier)
    sums = noisy_sums(
        np.concatenate(rows),
        np.repeat(np.arange(len(members)), list(map(len, members))),
        classes=len(members),
        noise_multiplier=noise_multiplier,
        key=subkey(key, b"sums"),
    )
    prepared = _prepared(manifest, found, sums, granted.privacy)
    if operator is None:
        return prepared
    settings = workspace.settings
    mask = Mask(subkey(key, b"mask"), settings.device_id, granted.signing_key, settings.min_devices or 2)
    return replace(prepared, mask=mask)


def _again(workspace: Workspace, build: BuildSubmission, found: FoundImages) -> PreparedSubmission:
    """Return a release whose noise key is deleted, as it was submitted."""
    payload = workspace.store.last_submission()
    if payload is None:
        raise PrivacyFailed(FAILED)
    submitted = decode(payload, Submission, max_bytes=len(payload))
    if submitted.mask is not UNSET:
        raise PrivacyRefused(SUBMITTED)
    counts = to_array(submitted.counts).astype(np.uint32)
    return PreparedSubmission(
        prototypes=to_array(submitted.prototypes),
        labels=to_array(submitted.labels).astype(np.uint32),
        counts=counts,
        classes=_reports(build.manifest, found, counts),
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


def _digest_of_names(images: Sequence[LabeledImage]) -> bytes:
    return digest_of("\0".join(image.identity for image in images).encode(errors="surrogateescape"))
