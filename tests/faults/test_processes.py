"""Processes that are killed, at any moment."""

from tests.faults.conftest import Keep
from tests.faults.fleet import Fleet, Reference


def test_calm(fleet: Fleet, reference: Reference, keep: Keep) -> None:
    """Without a fault, nothing is lost."""
    fleet.start()
    keep(fleet.check("none", 1, reference))
