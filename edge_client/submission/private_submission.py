"""Submissions under differential privacy: charged to the ledger first, and closed on failure: nothing is uploaded."""

import hashlib
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edge_client.data.extraction import Interrupted
from edge_client.data.images import LabeledImage
from edge_client.privacy.accountant import epsilon_of
from edge_client.privacy.gaussian_mechanism import COUNT_WEIGHT, Mechanism, private_prototypes
from edge_client.privacy.noise import KEY_BYTES, subkey
from edge_client.privacy.perturbation import to_half
from edge_client.privacy.policy import BUDGET, FAILED, NO_PROTOTYPE
from edge_client.storage.privacy_ledger import Release, multipliers
from edge_client.storage.stored_values import ClassReport, PrivacySpent
from edge_client.submission.features import Workspace, backbone_digests
from edge_client.submission.prepared_submission import FoundImages, PreparedSubmission
from protocol.errors import PrivacyRefused
from protocol.log import event
from protocol.wire.messages import DifferentialPrivacy, Privacy, TaskManifest

log = logging.getLogger(__name__)

_VERSION = b"1 %f" % COUNT_WEIGHT
"""Version of the mechanism; changes when the same key would give other noise."""


class PrivateSubmissions:
    """Prepares submissions under differential privacy; a dry run charges nothing."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._ledger = workspace.store.ledger

    def prepare(self, task: bytes, manifest: TaskManifest, found: FoundImages) -> PreparedSubmission:
        """Return noisy prototypes of all training images; the same images give the same release again.

        Raises:
            PrivacyRefused: the budget is exceeded, or any step failed; the text reveals nothing about images.
            Interrupted: the work is out of date.
        """
        try:
            return self._prepare(task, manifest, found)
        except (PrivacyRefused, Interrupted):
            raise
        except Exception as error:
            event(log, logging.ERROR, "differential privacy failed", error=f"{type(error).__name__}: {error}")
            raise PrivacyRefused(FAILED) from error

    def _prepare(self, task: bytes, manifest: TaskManifest, found: FoundImages) -> PreparedSubmission:
        wanted, secret = manifest.differential_privacy, self._workspace.secret(manifest)
        feature_size = sum(each.metadata.feature_size for each in self._workspace.backbones(manifest))
        if wanted is None or len(secret) != KEY_BYTES:
            raise PrivacyRefused(FAILED)
        members = [
            found.for_training(self._workspace.local.holdout, label) for label in range(len(manifest.classes))
        ]
        fingerprint = hashlib.sha256(_VERSION + task + hashlib.sha256(secret).digest())
        for images, features in self._features(manifest, members, feature_size):
            names = "\0".join(image.identity for image in images).encode(errors="surrogateescape")
            fingerprint.update(hashlib.sha256(names).digest() + hashlib.sha256(features.tobytes()).digest())
        key, privacy = self._charge(fingerprint.digest(), wanted)
        mechanism = Mechanism(
            clip_norm=wanted.clip_norm,
            noise_multiplier=wanted.noise_multiplier,
            batch_size=manifest.batch_size,
            min_images=manifest.min_images,
        )
        noisy = [
            private_prototypes(
                features,
                [image.identity for image in images],
                mechanism,
                secret=secret,
                key=subkey(key, b"%d" % label),
            )
            for label, (images, features) in enumerate(self._features(manifest, members, feature_size))
        ]
        sizes = [counts for _, counts in noisy]
        if not sum(map(len, sizes)):
            raise PrivacyRefused(NO_PROTOTYPE)
        return PreparedSubmission(
            prototypes=to_half(np.concatenate([values for values, _ in noisy])),
            labels=np.repeat(np.arange(len(noisy), dtype=np.uint32), list(map(len, sizes))),
            counts=np.concatenate(sizes),
            classes=tuple(_reports(manifest, found, members, sizes)),
            unusable=found.unusable,
            privacy=privacy,
        )

    def _charge(self, fingerprint: bytes, wanted: DifferentialPrivacy) -> tuple[bytes, Privacy]:
        """Return the noise key of a release and its cost; the newest release is not charged again.

        Raises:
            PrivacyRefused: the cost exceeds the task's or the device's budget.
        """
        before = self._ledger.releases()
        if before and before[-1].fingerprint == fingerprint and before[-1].key is not None:
            return before[-1].key, _cost(multipliers(before), wanted)
        number = len(before) + 1
        release = Release(number, fingerprint, wanted.noise_multiplier, os.urandom(KEY_BYTES))
        cost = _cost(multipliers((*before, release)), wanted)
        own_limit = (
            math.inf if self._workspace.local.max_epsilon is None else self._workspace.local.max_epsilon
        )
        limit = min(wanted.max_epsilon, own_limit)
        if not cost.total_epsilon <= limit:
            text = "privacy budget exceeded, nothing is uploaded"
            event(log, logging.ERROR, text, total_epsilon=cost.total_epsilon, max_epsilon=limit)
            raise PrivacyRefused(BUDGET)
        if not self._workspace.dry_run:
            spent = PrivacySpent(cost.epsilon, cost.total_epsilon, cost.delta, number, limit)
            self._ledger.charge(release, spent)
        return release.key or b"", cost

    def _features(
        self, manifest: TaskManifest, members: Sequence[Sequence[LabeledImage]], size: int
    ) -> Iterator[tuple[Sequence[LabeledImage], NDArray[np.float32]]]:
        """Yield the images of each class with their features, float32 (n, L); one class is in memory at a time."""
        for images in members:
            identities = [image.identity for image in images]
            yield images, self._workspace.cache.matrix(identities, *backbone_digests(manifest), size=size)


def _cost(releases: Counter[float], wanted: DifferentialPrivacy) -> Privacy:
    return Privacy(
        epsilon=epsilon_of({wanted.noise_multiplier: 1}, delta=wanted.delta),
        total_epsilon=epsilon_of(releases, delta=wanted.delta),
        delta=wanted.delta,
        releases=releases.total(),
    )


def _reports(
    manifest: TaskManifest,
    found: FoundImages,
    members: Sequence[Sequence[LabeledImage]],
    sizes: Sequence[NDArray[np.uint32]],
) -> Iterator[ClassReport]:
    """Yield reports for the device's operator; they are not uploaded."""
    for label, (name, images, counts) in enumerate(zip(manifest.classes, members, sizes, strict=True)):
        total = len(found.of_class(label))
        if total or len(counts):
            yield ClassReport(name, total, total - len(images), tuple(map(int, counts)))
