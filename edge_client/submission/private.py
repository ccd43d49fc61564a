"""A submission under differential privacy: paid for, and only then made. Whatever fails, nothing is uploaded."""

import hashlib
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edge_client.config import LocalSettings
from edge_client.data.extraction import Interrupted
from edge_client.data.images import LabeledImage, held_out
from edge_client.privacy.accountant import epsilon_of
from edge_client.privacy.gaussian_mechanism import COUNT_WEIGHT, Mechanism, private_prototypes
from edge_client.privacy.noise import KEY_BYTES, subkey
from edge_client.privacy.perturbation import to_half
from edge_client.privacy.policy import BUDGET, FAILED, NOTHING
from edge_client.storage.facts import ClassReport, PrivacySpent
from edge_client.storage.feature_cache import FeatureCache
from edge_client.storage.privacy_ledger import Ledger, Release, multipliers
from edge_client.submission.builder import FoundImages, PreparedSubmission, digests
from protocol.errors import PrivacyRefused
from protocol.wire.messages import DifferentialPrivacy, Privacy, TaskManifest

log = logging.getLogger(__name__)

_VERSION = b"1 %f" % COUNT_WEIGHT
"""Of the mechanism: one that would make something else of the same key is another."""


class PrivateWork:
    """Makes submissions under differential privacy.

    Args:
        local: the device's own.
        ledger: what was released before.
        cache: has the features of the images.
        secret: the device's, 32 bytes.
        dry: write nothing down, for nothing will be sent.
    """

    def __init__(
        self, local: LocalSettings, ledger: Ledger, cache: FeatureCache, *, secret: bytes, dry: bool
    ) -> None:
        self._local = local
        self._ledger = ledger
        self._cache = cache
        self._secret = secret
        self._dry = dry

    def prepare(
        self, task: bytes, manifest: TaskManifest, found: FoundImages, *, feature_size: int
    ) -> PreparedSubmission:
        """Make prototypes of all images that are not held out, or the same once more of the same images.

        Args:
            task: its identity.
            manifest: what it says, `check_task` having nothing against it.
            found: the device's images, whose features are in the cache.
            feature_size: L, of all backbones together.

        Raises:
            PrivacyRefused: it would cost too much, or anything else at all; the text says nothing of any image.
            Interrupted: there is something newer to do.
        """
        try:
            return self._prepare(task, manifest, found, feature_size)
        except (PrivacyRefused, Interrupted):
            raise
        except Exception as error:
            log.error("differential privacy has failed: %s: %s", type(error).__name__, error)
            raise PrivacyRefused(FAILED) from error

    def _prepare(
        self, task: bytes, manifest: TaskManifest, found: FoundImages, feature_size: int
    ) -> PreparedSubmission:
        wanted = manifest.differential_privacy
        if wanted is None or len(self._secret) != KEY_BYTES:
            raise PrivacyRefused(FAILED)
        members = [
            [image for image in found.of_class(label) if not held_out(image, self._local.holdout)]
            for label in range(len(manifest.classes))
        ]
        key, privacy = self._pay(self._fingerprint(task, manifest, members, feature_size), wanted)
        mechanism = Mechanism(
            clip_norm=wanted.clip_norm,
            noise_multiplier=wanted.noise_multiplier,
            batch_size=manifest.batch_size,
            min_images=manifest.min_images,
        )
        made = [
            private_prototypes(
                features,
                [image.identity for image in images],
                mechanism,
                secret=self._secret,
                key=subkey(key, b"%d" % label),
            )
            for label, (images, features) in enumerate(self._features(manifest, members, feature_size))
        ]
        sizes = [counts for _, counts in made]
        if not sum(map(len, sizes)):
            raise PrivacyRefused(NOTHING)
        return PreparedSubmission(
            prototypes=to_half(np.concatenate([values for values, _ in made])),
            labels=np.repeat(np.arange(len(made), dtype=np.uint32), list(map(len, sizes))),
            counts=np.concatenate(sizes),
            classes=tuple(self._reports(manifest, found, members, sizes)),
            refused=found.refused,
            privacy=privacy,
        )

    def _pay(self, fingerprint: bytes, wanted: DifferentialPrivacy) -> tuple[bytes, Privacy]:
        """The key of a release's noise, and what it costs: nothing where the newest release was this one.

        Raises:
            PrivacyRefused: it would cost more than the task or the device's owner allows.
        """
        before = self._ledger.releases()
        if before and before[-1].fingerprint == fingerprint and before[-1].key is not None:
            spent = self._spent(multipliers(before), wanted)
            return before[-1].key, spent
        number = len(before) + 1
        release = Release(number, fingerprint, wanted.noise_multiplier, os.urandom(KEY_BYTES))
        spent = self._spent(multipliers((*before, release)), wanted)
        limit = min(wanted.max_epsilon, self._limit())
        if not spent.total_epsilon <= limit:
            log.error(
                "one more submission would bring epsilon to %.3f, and %.3f is allowed: nothing is uploaded",
                *(spent.total_epsilon, limit),
            )
            raise PrivacyRefused(BUDGET)
        if not self._dry:
            recorded = PrivacySpent(spent.epsilon, spent.total_epsilon, spent.delta, number, limit)
            self._ledger.charge(release, recorded)
        return release.key or b"", spent

    def _limit(self) -> float:
        return math.inf if self._local.max_epsilon is None else self._local.max_epsilon

    def _spent(self, releases: Counter[float], wanted: DifferentialPrivacy) -> Privacy:
        return Privacy(
            epsilon=epsilon_of({wanted.noise_multiplier: 1}, delta=wanted.delta),
            total_epsilon=epsilon_of(releases, delta=wanted.delta),
            delta=wanted.delta,
            releases=releases.total(),
        )

    def _features(
        self, manifest: TaskManifest, members: Sequence[Sequence[LabeledImage]], size: int
    ) -> Iterator[tuple[Sequence[LabeledImage], NDArray[np.float32]]]:
        """The images of each class with their features, float32 (n, L), one class in memory at a time."""
        for images in members:
            identities = [image.identity for image in images]
            yield images, self._cache.matrix(identities, *digests(manifest), size=size)

    def _fingerprint(
        self, task: bytes, manifest: TaskManifest, members: Sequence[Sequence[LabeledImage]], size: int
    ) -> bytes:
        """All that a release follows from but its key: one bit that is another makes it another release."""
        sha256 = hashlib.sha256(_VERSION + task + hashlib.sha256(self._secret).digest())
        for images, features in self._features(manifest, members, size):
            names = "\0".join(image.identity for image in images).encode(errors="surrogateescape")
            sha256.update(hashlib.sha256(names).digest() + hashlib.sha256(features.tobytes()).digest())
        return sha256.digest()

    def _reports(
        self,
        manifest: TaskManifest,
        found: FoundImages,
        members: Sequence[Sequence[LabeledImage]],
        sizes: Sequence[NDArray[np.uint32]],
    ) -> Iterator[ClassReport]:
        """What the device's owner is shown, and nobody else."""
        for label, (name, images, counts) in enumerate(zip(manifest.classes, members, sizes, strict=True)):
            there = len(found.of_class(label))
            if there or len(counts):
                yield ClassReport(name, there, there - len(images), tuple(map(int, counts)))
