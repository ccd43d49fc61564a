"""A class is added to a running fleet: only the device that has its images uploads anything."""

import json
from pathlib import Path

import pytest

from protocol.mqtt.reconnecting_session import BrokerAddress
from tests.support.fleets.fleet import Fleet, write_digits, write_task
from tests.support.network.brokers import mosquitto, needs_mosquitto


def _uploads(fleet: Fleet, name: str) -> int:
    return fleet.log(name).count("submission built")


@needs_mosquitto
@pytest.mark.parametrize("algorithm", ["fedtc", "statistics"])
def test_added_class_is_uploaded_by_its_device_alone(
    tmp_path: Path, address: BrokerAddress, algorithm: str
) -> None:
    """The head of the continued task knows all classes; the submissions stay valid after a restart, too."""
    task, names = write_task(tmp_path, algorithm=algorithm, tables="", classes=list("0123")), ["a", "b", "c"]
    with mosquitto(address, tmp_path), Fleet(tmp_path, address) as fleet:
        fleet.start_aggregator(task)
        for name in names:
            fleet.start_device(name, write_digits(tmp_path / f"data-{name}", classes=[0, 1, 2, 3], each=25))
        before = fleet.wait_for(
            "the first head", lambda s: s["heads"] and s["heads"][0]["held_out"]["devices"] == 3
        )
        fleet.stop("aggregator")
        write_digits(tmp_path / "data-a", classes=[4], each=25)
        added = {"classes": list("01234"), "continues": before["task"]}
        task = write_task(tmp_path, algorithm=algorithm, tables="", **added)
        fleet.start_aggregator(task)
        after = fleet.wait_for(
            "a head of the new class",
            lambda s: (
                s["task"] != before["task"]
                and s["coverage"]["4"]["devices"] == 1
                and s["waiting"] == 0
                and all(device["head"] == s["rollout"]["current"] > 0 for device in s["devices"])
            ),
        )
        assert after["submissions"] == 3
        assert [_uploads(fleet, name) for name in names] == [2, 1, 1]
        assert fleet.log("aggregator").count("submissions of the continued task count submissions=3") == 1
        image = next((tmp_path / "data-a" / "4").glob("*.png"))
        assert fleet.predict("b", image)["label"] == "4"
        assert json.dumps(after["refusals"]) == json.dumps(before["refusals"])
        fleet.stop("aggregator")
        fleet.start_aggregator(task)
        fleet.wait_for_log("aggregator", "connected to the broker", times=3)
        again = fleet.status()
        assert (again["task"], again["submissions"]) == (after["task"], 3)
        assert [_uploads(fleet, name) for name in names] == [2, 1, 1]
