"""Submissions under differential privacy: charged to the ledger first, and closed on failure: nothing is uploaded."""

import hashlib
import logging
import os
from collections import Counter

import numpy as np

from edge_client.data.extraction import Interrupted
from edge_client.privacy.accountant import epsilon_of
from edge_client.privacy.gaussian_mechanism import COUNT_WEIGHT, Mechanism, private_prototypes
from edge_client.privacy.noise import KEY_BYTES, subkey
from edge_client.privacy.perturbation import to_half
from edge_client.privacy.policy import BUDGET, FAILED, NO_PROTOTYPE
from edge_client.storage.privacy_ledger import Release
from edge_client.storage.stored_values import ClassReport, PrivacySpent
from edge_client.submission.image_features import FoundImages, Workspace, backbone_digests
from edge_client.submission.prepared_submission import PreparedSubmission
from protocol.errors import PrivacyRefused
from protocol.log import event
from protocol.wire.messages import DifferentialPrivacy, Privacy, TaskManifest

log = logging.getLogger(__name__)

_VERSION = b"1 %f" % COUNT_WEIGHT
"""Version of the mechanism; changes when the same key would give other noise."""


def prepare_private(
    workspace: Workspace, task: bytes, manifest: TaskManifest, found: FoundImages
) -> PreparedSubmission:
    """Return noisy prototypes of all training images; the same images give the same release again.

    A dry run charges nothing.

    Raises:
        PrivacyRefused: the budget is exceeded, or any step failed; the text reveals nothing about images.
        Interrupted: the work is out of date.
    """
    try:
        return _prepare(workspace, task, manifest, found)
    except (PrivacyRefused, Interrupted):
        raise
    except Exception as error:
        event(log, logging.ERROR, "differential privacy failed", error=f"{type(error).__name__}: {error}")
        raise PrivacyRefused(FAILED) from error


def _prepare(
    workspace: Workspace, task: bytes, manifest: TaskManifest, found: FoundImages
) -> PreparedSubmission:
    wanted, secret = manifest.differential_privacy, workspace.secret(manifest)
    feature_size = sum(each.metadata.feature_size for each in workspace.backbones(manifest))
    if wanted is None or len(secret) != KEY_BYTES:
        raise PrivacyRefused(FAILED)
    digests = backbone_digests(manifest)
    members = [found.for_training(label) for label in range(len(manifest.classes))]
    fingerprint = hashlib.sha256(_VERSION + task + hashlib.sha256(secret).digest())
    # The features of one class are in memory at a time.
    for images in members:
        features = workspace.features(images, digests, feature_size)
        names = "\0".join(image.identity for image in images).encode(errors="surrogateescape")
        fingerprint.update(hashlib.sha256(names).digest() + hashlib.sha256(features.tobytes()).digest())
    key, privacy = _charge(workspace, fingerprint.digest(), wanted)
    mechanism = Mechanism(
        clip_norm=wanted.clip_norm,
        noise_multiplier=wanted.noise_multiplier,
        batch_size=manifest.batch_size,
        min_images=manifest.min_images,
    )
    noisy = [
        private_prototypes(
            workspace.features(images, digests, feature_size),
            [image.identity for image in images],
            mechanism,
            secret=secret,
            key=subkey(key, b"%d" % label),
        )
        for label, images in enumerate(members)
    ]
    sizes = [counts for _, counts in noisy]
    if not sum(map(len, sizes)):
        raise PrivacyRefused(NO_PROTOTYPE)
    # For the device's operator; they are not uploaded.
    reports = [
        ClassReport(name, total, total - len(members[label]), tuple(map(int, sizes[label])))
        for label, name in enumerate(manifest.classes)
        if (total := len(found.of_class(label))) or len(sizes[label])
    ]
    return PreparedSubmission(
        prototypes=to_half(np.concatenate([values for values, _ in noisy])),
        labels=np.repeat(np.arange(len(noisy), dtype=np.uint32), list(map(len, sizes))),
        counts=np.concatenate(sizes),
        classes=tuple(reports),
        unusable=found.unusable,
        privacy=privacy,
    )


def _charge(workspace: Workspace, fingerprint: bytes, wanted: DifferentialPrivacy) -> tuple[bytes, Privacy]:
    """Return the noise key of a release and its cost; the newest release is not charged again."""
    ledger, own_limit = workspace.store.ledger, workspace.settings.max_epsilon
    before = ledger.releases()
    if before and before[-1].fingerprint == fingerprint and before[-1].key is not None:
        return before[-1].key, _cost(before, wanted)
    number, key = len(before) + 1, os.urandom(KEY_BYTES)
    release = Release(number, fingerprint, wanted.noise_multiplier, key)
    cost = _cost((*before, release), wanted)
    limit = wanted.max_epsilon if own_limit is None else min(wanted.max_epsilon, own_limit)
    if not cost.total_epsilon <= limit:
        text = "privacy budget exceeded, nothing is uploaded"
        event(log, logging.ERROR, text, total_epsilon=cost.total_epsilon, max_epsilon=limit)
        raise PrivacyRefused(BUDGET)
    if not workspace.dry_run:
        ledger.charge(release, PrivacySpent(cost.epsilon, cost.total_epsilon, cost.delta, number, limit))
    return key, cost


def _cost(releases: tuple[Release, ...], wanted: DifferentialPrivacy) -> Privacy:
    multipliers = Counter(release.noise_multiplier for release in releases)
    return Privacy(
        epsilon=epsilon_of({wanted.noise_multiplier: 1}, delta=wanted.delta),
        total_epsilon=epsilon_of(multipliers, delta=wanted.delta),
        delta=wanted.delta,
        releases=len(releases),
    )
