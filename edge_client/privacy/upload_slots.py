"""The times at which a private device builds and publishes: none depends on an image, except for whether there is one.

A build that new images cause begins at a slot, a multiple of the period after an origin of the device and the task. It
is published one period after it has begun, however long it took, so that a period has to hold the slowest build.
"""

import math

from protocol.wire.codec import digest_of

INSTALL_S = 60.0
"""Seconds after which the evaluation of a head is published, or a shorter period: a build beside it slows it."""


def next_slot_s(now_s: float, period_s: float, *, device: str, task: bytes) -> float:
    """Return the first slot after a time, in unix seconds; each device has an origin of its own, to spread uploads."""
    origin_s = int.from_bytes(digest_of(device.encode() + task)[:6]) % 10**6 / 10**6 * period_s
    return origin_s + (math.floor((now_s - origin_s) / period_s) + 1) * period_s


def longest_build_s(images: int, slot_s: float) -> float:
    """Return the time of the slowest build of so many images: each is decoded while a backbone runs on an earlier one.

    `slot_s` is the most seconds that either takes for an image.
    """
    return (images + 1) * slot_s


def proposed_period_s(images: int, slot_s: float) -> float:
    """Return whole hours that hold a build of so many images, each of which takes at most `slot_s` seconds."""
    return 3600.0 * math.ceil(longest_build_s(images, slot_s) / 3600)


def publication_s(end_s: float, now_s: float, period_s: float) -> float:
    """Return when a build that was to be published at `end_s` is: a period later for each that it took too long."""
    return end_s + max(0, math.ceil((now_s - end_s) / period_s)) * period_s
