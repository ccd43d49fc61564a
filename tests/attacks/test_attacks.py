"""Whatever is tried on a fleet: nothing of it succeeds, nothing of the fleet changes, and an operator sees it."""

from collections.abc import Callable
from dataclasses import asdict

import pytest

from tests.attacks.conftest import ROW
from tests.attacks.ground import Ground
from tests.attacks.suite import ATTACKS
from tests.attacks.table import Row


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_of_it_succeeds(
    ground: Ground, name: str, record_property: Callable[[str, object], None]
) -> None:
    """Each attack is made; then the honest devices' submissions and head are what they were, and it is counted."""
    attack = ATTACKS[name]
    before = ground.refusals()
    outcomes = list(attack.attempt(ground))
    assert outcomes
    row = Row(name, len(outcomes), sum(outcomes), attack.stopped_by, attack.shown)
    record_property(ROW, asdict(row))
    assert row.succeeded == 0, ground.last_words()
    ground.until(
        f"{attack.seen} in status",
        lambda: all(ground.refusals()[each] > before[each] for each in attack.seen),
    )
    ground.check()
