"""The log of accepted submissions."""

from collections.abc import Iterator

import pytest

from aggregator.coordination.round_state import DeviceDecisions, Entry, State
from aggregator.heads.accepted_submissions import devices_after


class Lookups(dict[str, Entry]):
    """A mapping whose devices can be looked up, and not be looked through."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("work for each submission that grows with the fleet")


@pytest.mark.parametrize(("device", "expected"), [("a", 2), ("new", 3), ("bad", 2)])
def test_devices_are_counted_without_looking_at_all(device: str, expected: int) -> None:
    """A device that submits again counts once, and a quarantined one does not."""
    entry = Entry(1, bytes(32), 0.0)
    submissions = Lookups(a=entry, b=entry, revoked=entry)
    decisions = DeviceDecisions(quarantined=frozenset({"revoked", "bad"}))
    assert devices_after(device, State(submissions=submissions, decisions=decisions)) == expected
