"""Whatever is done to a fleet: every submission counts exactly once, and the head is the one of a fleet at peace."""

import pytest

from tests.faults.conftest import Runs
from tests.faults.suite import FAULTS


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_lost(runs: Runs, fault: str) -> None:
    """Each fault is provoked as often as it says; then nothing is missing, nothing is there twice, no head differs."""
    runs.wait(fault)
