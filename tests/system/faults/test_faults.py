"""Under every fault, each submission counts exactly once, and the head equals that of a fleet without faults."""

from collections.abc import Callable
from dataclasses import asdict

import pytest

from tests.system.faults.conftest import Runs
from tests.system.faults.suite import FAULTS


@pytest.mark.parametrize("fault", FAULTS)
def test_no_submission_is_lost(
    runs: Runs, fault: str, record_property: Callable[[str, object], None]
) -> None:
    """Each fault is provoked as often as stated; then nothing is lost, nothing counts twice, no head differs."""
    try:
        runs.wait(fault)
    finally:
        if fault in runs.rows:
            record_property("faults", asdict(runs.rows[fault]))
