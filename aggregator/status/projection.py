"""The submitted prototypes in two dimensions: their first two principal components."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
import numpy as np
from msgspec import UNSET, Meta
from numpy.typing import NDArray

from aggregator.storage.store import Store
from protocol.errors import MalformedMessage, StateError
from protocol.wire.codec import decode, digest_of, to_array
from protocol.wire.messages import Submission
from protocol.wire.quantization import RANGE, dequantize

MAX_DEVICES = 200
"""Devices in the projection; of more, as many evenly spaced by name, and those in quarantine first."""

MAX_POINTS = 4000

SMALL = 8
"""Rows or columns of which all components are computed."""


class Projection(msgspec.Struct, frozen=True, kw_only=True):
    """Prototypes in the plane of their first two principal components, one entry of each column per prototype."""

    devices: Annotated[tuple[str, ...], Meta(description="Devices with prototypes in the columns.")] = ()
    of_devices: Annotated[int, Meta(description="Devices that have submitted.")] = 0
    explained: Annotated[
        tuple[float, ...], Meta(description="Shares of the variance, of the two components.")
    ] = ()
    device: Annotated[tuple[int, ...], Meta(description="Index of the device.")] = ()
    label: Annotated[tuple[int, ...], Meta(description="Index of the class.")] = ()
    x: tuple[float, ...] = ()
    y: tuple[float, ...] = ()


class Sources(msgspec.Struct, frozen=True):
    """The submissions of a projection: equal sources have equal projections."""

    digests: Mapping[str, bytes]
    """Of the chosen devices, in the order of their names."""
    of_devices: int


def projection_sources(store: Store) -> Sources:
    """Return the submissions to project; raises StateError if no aggregator has run on this state yet."""
    with store.database.snapshot():
        task = store.served_task().digest
        submissions = store.submissions.all(task)
        held = {device for device, entry in store.quarantine.all(task).items() if entry.released_s is None}
    names = sorted(submissions)
    chosen = [name for name in names if name in held][:MAX_DEVICES]
    rest = [name for name in names if name not in held]
    places = np.linspace(0, len(rest) - 1, min(len(rest), MAX_DEVICES - len(chosen))).astype(int)
    chosen += [rest[place] for place in places]
    return Sources({name: submissions[name].entry.digest for name in sorted(chosen)}, len(names))


def project(read: Callable[[bytes], bytes], sources: Sources) -> Projection:
    """Return the projection of submissions that `read` reads; one that cannot be read is left out."""
    each = max(1, MAX_POINTS // max(1, len(sources.digests)))
    devices: list[str] = []
    rows: list[NDArray[np.float32]] = []
    labels: list[NDArray[np.integer]] = []
    for device, digest in sources.digests.items():
        found = _prototypes(read, digest)
        if found is None or (rows and found[0].shape[1] != rows[0].shape[1]):
            continue
        places = np.linspace(0, len(found[0]) - 1, min(each, len(found[0]))).astype(int)
        devices.append(device)
        rows.append(found[0][places])
        labels.append(found[1][places])
    if not rows:
        return Projection(of_devices=sources.of_devices)
    points, explained = principal_components(np.concatenate(rows))
    return Projection(
        devices=tuple(devices),
        of_devices=sources.of_devices,
        explained=tuple(float(share) for share in explained),
        device=tuple(int(place) for place in np.repeat(np.arange(len(rows)), [len(part) for part in rows])),
        label=tuple(int(label) for label in np.concatenate(labels)),
        x=_rounded(points[:, 0]),
        y=_rounded(points[:, 1]),
    )


def principal_components(values: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rows (n, L) in their first two principal components (n, 2), and the shares of the variance (2,).

    The largest loading of each component is positive, so that a further row does not mirror the others.
    """
    centered = values - values.mean(axis=0, dtype=np.float64)
    total = float((centered**2).sum())
    directions, variances = np.zeros((centered.shape[1], 2)), np.zeros(2)
    if total > 0:
        singular, rows = _largest(centered)
        rows *= np.sign(rows[np.arange(len(rows)), np.abs(rows).argmax(axis=1)])[:, None]
        directions[:, : len(rows)], variances[: len(rows)] = rows.T, singular**2
    return centered @ directions, variances / total if total > 0 else variances


def _largest(centered: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the two largest singular values (k,) of rows (n, L), and their right vectors (k, L)."""
    if min(centered.shape) <= SMALL:
        _, singular, rows = np.linalg.svd(centered, full_matrices=False)
        return singular[:2], rows[:2]
    from scipy.sparse.linalg import svds

    start = np.random.default_rng(0).normal(size=min(centered.shape))
    _, singular, rows = svds(centered, k=2, v0=start)
    return singular[::-1].copy(), rows[::-1].copy()


def _rounded(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Return four significant figures: enough for a screen."""
    return tuple(float(f"{value:.4g}") for value in values)


def _prototypes(
    read: Callable[[bytes], bytes], digest: bytes
) -> tuple[NDArray[np.float32], NDArray[np.integer]] | None:
    """Return a submission's prototypes, or class means of its statistics, and labels; None if unreadable or masked."""
    with contextlib.suppress(OSError, StateError, MalformedMessage):
        data = read(digest)
        if digest_of(data) == digest:
            submission = decode(data, Submission, max_bytes=len(data))
            if submission.mask is UNSET:
                return _values(submission), to_array(submission.labels)
    return None


def _values(submission: Submission) -> NDArray[np.float32]:
    values = to_array(submission.prototypes)
    if RANGE in submission.tensors:
        return dequantize(values, to_array(submission.tensors[RANGE]))
    if submission.prototypes.dtype == "i4":  # class sums
        counts = to_array(submission.counts).astype(np.float32)
        return (values / np.maximum(counts, 1)[:, None]).astype(np.float32)
    return values.astype(np.float32)
