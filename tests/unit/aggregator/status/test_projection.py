"""Prototypes in two dimensions."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from aggregator.coordination.round_state import Entry
from aggregator.status.projection import MAX_DEVICES, principal_components, project, projection_sources
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from protocol.wire.codec import encode
from tests.support.messages.submissions import TASK, submission, values_of
from tests.unit.aggregator.status.stores import started_store


def submit(store: Store, device: str, seed: int) -> None:
    message = submission(seed=seed)
    digest = store.blobs.put(encode(message))
    record = SubmissionRecord(device, Entry(1, digest, 0.0, 0), 1, 20, 4, {0: 2, 1: 1, 2: 1})
    store.submissions.put(TASK, record)


@pytest.mark.parametrize("shape", [(200, 30), (30, 200), (3, 50), (50, 1), (1, 5)])
def test_components_are_those_of_the_covariance(shape: tuple[int, int]) -> None:
    """Variances and distances along the components are those of a full decomposition."""
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32) * np.arange(1, shape[1] + 1)
    points, shares = principal_components(values.astype(np.float32))
    centered = values - values.mean(axis=0)
    singular = np.append(np.linalg.svd(centered, compute_uv=False), [0.0, 0.0])
    assert np.linalg.norm(points, axis=0) == pytest.approx(singular[:2], rel=1e-4, abs=1e-4)
    assert shares * (singular**2).sum() == pytest.approx(singular[:2] ** 2, rel=1e-4, abs=1e-4)


def test_same_prototypes_have_the_same_places(tmp_path: Path) -> None:
    """Each point is a stored prototype with its device and class; what cannot be read is left out."""
    with contextlib.closing(started_store(tmp_path)) as store:
        for seed, device in enumerate(("a", "b", "c")):
            submit(store, device, seed)
        sources = projection_sources(store)
        first, again = project(store.blob_reader(), sources), project(store.blob_reader(), sources)
        assert first == again
        assert first.devices == ("a", "b", "c")
        assert first.device == (0,) * 4 + (1,) * 4 + (2,) * 4
        assert first.label == (0, 0, 1, 2) * 3
        values = np.concatenate([values_of(submission(seed=seed)) for seed in range(3)])
        points, _ = principal_components(values)
        assert np.column_stack([first.x, first.y]) == pytest.approx(points, rel=1e-2, abs=1e-2)
        file = tmp_path / "blobs" / sources.digests["b"].hex()
        file.write_bytes(b"damaged")
        assert project(store.blob_reader(), sources).devices == ("a", "c")


def test_devices_in_quarantine_are_always_shown(tmp_path: Path) -> None:
    with contextlib.closing(started_store(tmp_path)) as store:
        with store.transaction():
            for number in range(2 * MAX_DEVICES):
                submit(store, f"shed-{number:04}", number % 3)
            store.quarantine.add(TASK, "shed-0001", reason="far", now_s=1.0)
        sources = projection_sources(store)
        assert len(sources.digests) == MAX_DEVICES
        assert sources.of_devices == 2 * MAX_DEVICES
        assert "shed-0001" in sources.digests
