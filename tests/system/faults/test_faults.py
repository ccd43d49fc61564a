"""Whatever is done to a fleet: every submission counts exactly once, and the head is the one of a fleet at peace."""

from collections.abc import Callable
from dataclasses import asdict

import pytest

from tests.system.faults.conftest import ROW, Runs
from tests.system.faults.suite import FAULTS


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_lost(runs: Runs, fault: str, record_property: Callable[[str, object], None]) -> None:
    """Each fault is provoked as often as it says; then nothing is missing, nothing is there twice, no head differs."""
    try:
        runs.wait(fault)
    finally:
        if fault in runs.rows:
            record_property(ROW, asdict(runs.rows[fault]))
