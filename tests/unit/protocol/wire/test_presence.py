"""The newer one of two programs with the same name."""

import pytest

from protocol.wire.presence import is_newer


@pytest.mark.parametrize(
    ("epoch", "newer"),
    [(999, False), (1000, False), (1001, True), (5000, True), (8601, False), (2**63 - 1, False)],
)
def test_later_epoch_is_newer(epoch: int, newer: bool) -> None:  # noqa: FBT001 - a case
    assert is_newer(epoch, own=1000, now_s=5000.0) is newer


def test_future_epochs_are_compared_with_each_other() -> None:
    assert is_newer(10**10 + 1, own=10**10, now_s=5000.0)
