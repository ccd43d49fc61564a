"""Lists of masked submissions, as an aggregator requests their sum from a second operator."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.statistics.secure_sums import mask_of, sealed_mask, submission_context
from protocol.wire.codec import digest_of
from protocol.wire.messages import MaskedSubmission, SumRequest

FLEET, TASK = "barn", bytes([7]) * 32
NAMES = [f"shed-{number}" for number in range(1, 7)]


def signing_key(device: str) -> bytes:
    return digest_of(f"key {device}".encode())


def seed_of(device: str) -> bytes:
    return digest_of(f"seed {device}".encode())


def masked_submission(
    device: str, *, seal_key: bytes, min_devices: int = 2, sequence: int = 1, values: int = 40, **where: Any
) -> MaskedSubmission:
    """Return a device's submission, sealed for a public key; `where` are other fields of the context."""
    given = {"fleet": FLEET, "task": TASK, "device": device, "sequence": sequence, "values": values, **where}
    keys = {"seal_key": seal_key, "signing_key": signing_key(device), "context": submission_context(**given)}
    mask = sealed_mask(seed_of(device), min_devices=min_devices, **keys)
    return MaskedSubmission(device=device, sequence=sequence, mask=mask)


def sum_request(devices: Sequence[str], *, seal_key: bytes, values: int = 40, **options: Any) -> SumRequest:
    submissions = tuple(
        masked_submission(each, seal_key=seal_key, values=values, **options) for each in devices
    )
    return SumRequest(
        task=options.get("task", TASK), seal_key=seal_key, values=values, submissions=submissions
    )


def sum_of(devices: Sequence[str], values: int = 40) -> NDArray[np.uint32]:
    """Return the sum of the devices' masks, by Python's integers."""
    rows = [mask_of(seed_of(device), values).tolist() for device in devices]
    return np.array([sum(column) % 2**32 for column in zip(*rows, strict=True)], np.uint32)
