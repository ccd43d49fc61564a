"""Charges of privacy: a release is recorded, with what all releases cost together, before an image is read for it."""

import logging
import math
import os

import msgspec

from edge_client.config import Settings
from edge_client.privacy.noise_key import KEY_BYTES, subkey
from edge_client.privacy.policy import BUDGET, FAILED, LOCAL_BUDGET, satisfies_unit
from edge_client.privacy.spending import is_conditional, local_epsilon, spent_by, total_epsilon
from edge_client.store.device_state import DeviceState
from edge_client.store.job_folder import Charge, Grant
from edge_client.store.privacy_ledger import Ledger, Release
from edge_client.store.stored_values import PrivacySpent
from protocol.errors import PrivacyFailed, PrivacyRefused, StateError
from protocol.log import event
from protocol.wire.codec import decode, digest_of
from protocol.wire.messages import DifferentialPrivacy, Privacy, Submission, TaskManifest

log = logging.getLogger(__name__)

_VERSION = b"5"
"""Version of the mechanism; changes when the same key would give other noise."""


def requires_privacy(settings: Settings, ledger: Ledger) -> bool:
    """Return whether a device takes part in tasks with differential privacy only.

    That is so if its owner has set a budget or a unit, or it has made private releases, unless the owner allows other
    tasks.
    """
    is_demanded = settings.max_epsilon is not None or settings.privacy_unit is not None
    return (is_demanded or not ledger.is_empty()) and not settings.allow_non_private_tasks


def is_within_limits(cost: Privacy, *, settings: Settings, ledger: Ledger) -> bool:
    """Return whether a submission's release and those before it satisfy the owner's limits of this start."""
    max_epsilon, max_local = (
        math.inf if limit is None else limit for limit in (settings.max_epsilon, settings.max_local_epsilon)
    )
    delta = min(cost.delta, settings.max_delta)
    try:
        releases = ledger.releases()[: cost.releases]
    except PrivacyRefused:
        return False
    if max(cost.total_epsilon, total_epsilon(releases, delta=delta)) > max_epsilon:
        return False
    if not releases or not satisfies_unit(releases[-1].images_per_person, settings.privacy_unit):
        return False
    return not is_conditional(releases[-1:]) or local_epsilon(releases, delta=delta) <= max_local


class Charges:
    """The charges of one build, for a task with differential privacy; a dry run charges nothing."""

    def __init__(
        self, store: DeviceState, settings: Settings, *, task: bytes, manifest: TaskManifest, dry_run: bool
    ) -> None:
        if manifest.differential_privacy is None:
            raise PrivacyFailed(FAILED)
        self._store, self._settings, self._dry_run = store, settings, dry_run
        self._task, self._manifest = task, manifest
        self._wanted: DifferentialPrivacy = manifest.differential_privacy
        operator = manifest.second_operator
        self._honest = 1 if operator is None else operator.honest
        self._delta = min(self._wanted.delta, settings.max_delta)
        self._release: Release | None = None

    def answer(self, charge: Charge) -> Grant:
        """Return the release for listed images, or for their features once these are known.

        The newest release is not charged again if it is for the same, but has to be within the limits. It has no key
        once its submission is uploaded; if that is lost, it is charged again.

        Raises:
            PrivacyRefused: the budget is exceeded.
            PrivacyFailed: there is no release to bind, the device's secret is lost, or any step failed.
            StateError: the disk is full or fails.
        """
        try:
            return self._answer(charge)
        except (PrivacyRefused, StateError):
            raise
        except Exception as error:
            event(log, logging.ERROR, "charge failed", error=f"{type(error).__name__}: {error}")
            raise PrivacyFailed(FAILED) from error

    def _answer(self, charge: Charge) -> Grant:
        if charge.content is None:
            release = self._charge(self._fingerprint(charge))
        elif self._release is None:
            raise PrivacyFailed(FAILED)
        else:
            release = self._bind(self._release, charge.content)
        self._release = release
        cost = self._cost((*self._store.ledger.releases()[: release.number - 1], release))
        is_masked = self._manifest.second_operator is not None
        choice_key = subkey(self._secret(), b"choice of images")
        return Grant(release, cost, self._signing_key() if is_masked else b"", choice_key)

    def _signing_key(self) -> bytes:
        enrolled = self._settings.identity.signing_key
        return self._store.signing_key(enrolled, keep=not self._dry_run) or os.urandom(KEY_BYTES)

    def _fingerprint(self, charge: Charge) -> bytes:
        """Return a digest of what determines a release before any image is read."""
        return digest_of(_VERSION + self._task + digest_of(self._secret()) + charge.labels + charge.names)

    def _secret(self) -> bytes:
        try:
            return self._store.secret(keep=not self._dry_run)
        except Exception as error:
            event(log, logging.ERROR, "no secret for noise", error=error)
            raise PrivacyFailed(FAILED) from error

    def _charge(self, fingerprint: bytes) -> Release:
        before = self._store.ledger.releases()
        if before and before[-1].fingerprint == fingerprint:
            newest = before[-1]
            if self._dry_run and newest.key is None:
                newest = msgspec.structs.replace(newest, key=os.urandom(KEY_BYTES))
            if newest.key is not None or self._is_submitted(len(before)):
                self._require_budget(before)  # the owner may have lowered the limit since
                return newest
        return self._charge_new(before, fingerprint, None)

    def _bind(self, release: Release, content: bytes) -> Release:
        """Return the release whose noise is for these features; if it was for others, a new one, which is charged."""
        if release.content == content:
            return release
        if release.content is not None:
            return self._charge_new(self._store.ledger.releases(), release.fingerprint, content)
        if not self._dry_run:
            self._store.ledger.bind(release.number, content)
        return msgspec.structs.replace(release, content=content)

    def _charge_new(self, before: tuple[Release, ...], fingerprint: bytes, content: bytes | None) -> Release:
        key = os.urandom(KEY_BYTES)
        release = Release(
            *(len(before) + 1, fingerprint, self._wanted.noise_multiplier, key, content),
            honest=self._honest,
            images_per_person=self._wanted.images_per_person or None,
        )
        spent = self._require_budget((*before, release))
        if not self._dry_run:
            self._store.ledger.charge(release, spent)
        return release

    def _is_submitted(self, newest: int) -> bool:
        """Return whether the newest release's submission is in the outbox, intact, and was made for this task."""
        outbox = self._store.outbox
        for item in outbox.items():
            if (item.kind, item.task) == ("submission", self._task) and (
                payload := outbox.payload(item)
            ) is not None:
                privacy = decode(payload, Submission, max_bytes=len(payload)).privacy
                if privacy is not None and privacy.releases == newest:
                    return True
        return False

    def _require_budget(self, releases: tuple[Release, ...]) -> PrivacySpent:
        """Return what the releases cost together; raises PrivacyRefused above a limit of the task or of the owner.

        The owner's delta limits that of the task, whose total would be smaller at a larger one.
        """
        settings, cost = self._settings, self._cost(releases)
        limit = min(self._wanted.max_epsilon, settings.max_epsilon or math.inf)
        local, max_local = local_epsilon(releases, delta=self._delta), settings.max_local_epsilon
        text = "privacy budget exceeded, nothing is uploaded"
        if not cost.total_epsilon <= limit:
            event(log, logging.ERROR, text, total_epsilon=cost.total_epsilon, max_epsilon=limit)
            raise PrivacyRefused(BUDGET)
        if self._manifest.second_operator is not None and max_local is not None and not local <= max_local:
            event(log, logging.ERROR, text, local_epsilon=local, max_local_epsilon=max_local)
            raise PrivacyRefused(LOCAL_BUDGET)
        return spent_by(releases, delta=self._delta, settings=settings, max_epsilon=limit)

    def _cost(self, releases: tuple[Release, ...]) -> Privacy:
        return Privacy(
            epsilon=total_epsilon(releases[-1:], delta=self._delta),
            total_epsilon=total_epsilon(releases, delta=self._delta),
            delta=self._delta,
            releases=len(releases),
        )
