"""Quotas of a fleet that several programs share, on both databases."""

import contextlib
from pathlib import Path

import pytest

from aggregator.config.schema import Limits
from aggregator.coordination.round_state import Entry
from aggregator.intake.quotas import Quotas
from aggregator.intake.validation import Refused
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from tests.support.messages.submissions import TASK

LIMITS = Limits(max_devices=2, max_storage_mb=2, uploads_per_hour=3)
_MIB = 1024**2


def _accept(store: Store, device: str, size_bytes: int) -> None:
    """Store a submission as a receiver does, in a transaction."""
    quotas = Quotas(store, LIMITS, task=TASK)
    with store.transaction():
        if store.keys.get(device) is None:
            quotas.check_new_device(device)
            store.keys.pin(device, device.encode() * 32, now_s=1.0)
        quotas.check_submission(device, size_bytes)
        store.submissions.put(TASK, SubmissionRecord(device, Entry(1, b"d", 1.0), size_bytes, 1, 1, {}))
        quotas.count_upload()


def test_programs_of_a_fleet_share_its_quotas(store: Store) -> None:
    """Each counts what the others have accepted, and what it has refused itself changes nothing."""
    with contextlib.closing(open_store(store.folder)) as other:
        _accept(store, "a", _MIB)
        with pytest.raises(Refused, match=r"stores 1\.0 of 2 MiB"):
            _accept(other, "b", _MIB + 1)
        assert other.keys.get("b") is None
        _accept(other, "b", _MIB)
        with pytest.raises(Refused, match=r"limits\.max_devices allows \(2\)"):
            _accept(store, "c", 1)
        _accept(store, "a", _MIB)
        for each in (store, other):
            with pytest.raises(Refused, match=r"limits\.uploads_per_hour"):
                _accept(each, "a", 1)
        assert other.submissions.stored_bytes() == 2 * _MIB


def test_fleet_without_quotas_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads and stores nothing for them."""
    with contextlib.closing(open_store(tmp_path)) as store:
        quotas = Quotas(store, Limits(), task=TASK)

        def unexpected(*_: object) -> None:
            raise AssertionError

        monkeypatch.setattr(store.database, "read", unexpected)
        monkeypatch.setattr(store.database, "write", unexpected)
        quotas.check_new_device("a")
        quotas.check_transfer("a", b"d" * 32, 2**30)
        quotas.check_submission("a", 2**30)
        quotas.count_upload()
