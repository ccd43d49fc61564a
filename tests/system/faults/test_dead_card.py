"""A device whose card has died, on real processes: a new state folder renews no privacy budget."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from edge_client.privacy.policy import BUDGET, NOT_PRIVATE
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import PrivacySpent
from tests.support.fleets.fleet import Fleet, write_digits, write_task
from tests.support.fleets.secure_fleet import EACH, write_private_task
from tests.support.network.brokers import free_address, mosquitto


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with mosquitto(address := free_address(), tmp_path), Fleet(tmp_path, address) as fleet:
        yield fleet


def test_a_new_card_renews_no_budget(fleet: Fleet) -> None:
    """The device adopts what the aggregator has stored under its name, also one that has started anew since.

    It does so with a new key, which is refused, and in a task without differential privacy: it submits nothing.
    """
    task = write_private_task(fleet.root, min_devices=1, operator="")
    data = write_digits(fleet.root / "data", classes=list(range(10)), start=0, each=EACH)
    fleet.start_aggregator(task)
    options = ("--max-epsilon", "8.5")  # a submission has 8
    fleet.start_device("device", data, *options)
    fleet.wait_for_log("device", "submission received")
    fleet.kill("device")
    fleet.kill("aggregator")
    state = fleet.device_state("device")
    with closing(DeviceState(state, read_only=True)) as store:
        before = store.get(PrivacySpent)
    (fleet.root / "signing.key").write_bytes((state / "signing.key").read_bytes())
    shutil.rmtree(state)
    state.mkdir()
    shutil.move(fleet.root / "signing.key", state)
    fleet.start_aggregator(task)
    fleet.start_device("device", data, *options)
    summary = fleet.wait_for(
        "the alarm", lambda s: any("lost record" in each["title"] for each in s["attention"])
    )
    assert summary["devices"][0]["lost_releases"] == 1
    fleet.wait_for("the refusal", lambda s: s["devices"][0]["problem"] == BUDGET)
    fleet.kill("device")
    with closing(DeviceState(state, read_only=True)) as store:
        spent = store.get(PrivacySpent)
        assert store.outbox.newest_submission() is None
    assert (spent.total_epsilon, spent.releases, spent.adopted) == (before.total_epsilon, 1, 1)
    fleet.kill("aggregator")
    shutil.rmtree(state)
    fleet.start_aggregator(write_task(fleet.root))
    fleet.start_device("device", data)
    fleet.wait_for_log("device", NOT_PRIVATE)
    with closing(DeviceState(state, read_only=True)) as store:
        assert store.get(PrivacySpent).adopted == 1
        assert store.outbox.items() == ()
