"""The aggregator's record of a device's releases: a device adopts those that its own ledger has lost.

A state folder that is lost, or restored from an older copy, would otherwise renew a budget. That is protection against
accidents: a dishonest aggregator can withhold the record.
"""

import contextlib
import logging
import sys

import msgspec

from edge_client.config import Settings
from edge_client.privacy.spending import spent_by, total_epsilon
from edge_client.store.device_state import DeviceState
from edge_client.store.privacy_ledger import Ledger, Release
from protocol.errors import MalformedMessage, PrivacyRefused
from protocol.log import event
from protocol.statistics.gaussian_privacy import STEPS, noise_multiplier
from protocol.statistics.noisy_sums import epsilon_of_sums
from protocol.wire.messages import Released
from protocol.wire.privacy_record import Kinds, kinds_of, record_of

log = logging.getLogger(__name__)

MAX_ADOPTED = 1000
"""Releases that are adopted at once: a device that has lost more needs its owner, and no record makes hours of work."""

ADOPTED = (
    "this device's record of private submissions was lost or restored from an older copy: it has adopted the "
    "aggregator's"
)


def record_in(ledger: Ledger) -> tuple[Released, ...]:
    """Return the record of a device's releases; raises PrivacyRefused if some of them are lost."""
    return record_of(_kinds(ledger.releases()))


def adopt(store: DeviceState, settings: Settings, record: tuple[Released, ...]) -> bool:
    """Record the releases that the aggregator names and the ledger lacks; return whether it names all of the ledger's.

    Nothing more is recorded once the budget is exceeded, or epsilon is infinite.

    Raises:
        MalformedMessage: the ledger lacks more than a device loses.
        PrivacyRefused: releases of the ledger are lost.
        StateError: the disk is full or fails.
    """
    releases = store.ledger.releases()
    own, named = _kinds(releases), kinds_of(record)
    if (lacking := (named - own).total()) > MAX_ADOPTED:
        raise MalformedMessage(
            f"the aggregator names {lacking} releases of this device that it does not know, more than {MAX_ADOPTED}: "
            "if that is true, give it another --device-id, and record what it has spent with `edge-client adopt-spent`"
        )
    adopted, limit = 0, settings.max_epsilon or sys.float_info.max
    for kind in (named - own).elements():
        if total_epsilon(releases, delta=settings.max_delta) > limit:
            break
        adopted += 1
        unknown = _unknown(len(releases) + 1, kind.noise_multiplier, honest=kind.honest)
        counted = kind.images_per_person or None
        releases = (*releases, msgspec.structs.replace(unknown, images_per_person=counted))
        spent = spent_by(releases, delta=settings.max_delta, settings=settings, adopted=adopted)
        store.ledger.charge(releases[-1], spent)
    if adopted:
        event(log, logging.WARNING, ADOPTED, releases=adopted)
    return not own - named


def adopt_spent(store: DeviceState, *, epsilon: float | None, delta: float) -> str:
    """Repair a damaged ledger with what is left of it, add a release that costs `epsilon`; return what follows."""
    if epsilon is None:
        with contextlib.suppress(PrivacyRefused):
            store.ledger.releases()
            return (
                "the record is intact: the device adopts by itself what the aggregator has stored beside it"
            )
    left = store.ledger.left()
    if epsilon is not None:
        # The next smaller multiplier, since this one costs at most epsilon.
        multiplier = noise_multiplier(epsilon, delta, cost=epsilon_of_sums) - 1 / STEPS
        left = (*left, _unknown(len(left) + 1, multiplier, honest=0))
    spent = spent_by(left, delta=delta, settings=None, adopted=len(left))
    store.ledger.replace(left, spent)
    return (
        f"epsilon {spent.total_epsilon:.3f} of {len(left)} submissions at delta {delta:g} is recorded; at the next "
        "start, the device adopts what the aggregator has stored of others under its name"
    )


def _unknown(number: int, multiplier: float, *, honest: int) -> Release:
    """Return a release of images that are not known."""
    return Release(number, b"", multiplier, None, honest=honest)


def _kinds(releases: tuple[Release, ...]) -> Kinds:
    return Kinds(
        Released(each.noise_multiplier, each.honest, 1, each.images_per_person or 0) for each in releases
    )
