"""The fleet that is attacked."""

from collections.abc import Iterator

import pytest

from tests.support.brokers import mosquitto_program
from tests.support.closed_fleet import FLEET
from tests.support.fleet import write_task
from tests.system.attacks.fleet import HONEST, AttackedFleet
from tests.system.attacks.marked_images import write_images


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedFleet]:
    """A closed fleet whose honest devices use a head; skips where there is no mosquitto."""
    if mosquitto_program() is None:
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    root = tmp_path_factory.mktemp("attacks")
    task = write_task(root, fleet=FLEET, quorum=len(HONEST), retrain_after=1000, deadline_s=100_000)
    with AttackedFleet(root, task, write_images(root)) as fleet:
        yield fleet
