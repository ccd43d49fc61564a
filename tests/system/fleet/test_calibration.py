"""A fleet of real devices gets one calibrated version of its head, although the aggregator is killed meanwhile."""

import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
from PIL import Image

from protocol.mqtt.reconnecting_session import BrokerAddress
from tests.support.fleets.fleet import Fleet, write_digits, write_task
from tests.support.fleets.startup_code import hanging
from tests.support.network.brokers import mosquitto, needs_mosquitto


@needs_mosquitto
def test_fleet_gets_one_calibrated_head(tmp_path: Path, address: BrokerAddress) -> None:
    """It is as accurate as the head that it calibrates, and devices predict with it, or answer `unknown`."""
    task, names = write_task(tmp_path, quorum=3), ["a", "b", "c"]
    with mosquitto(address, tmp_path), Fleet(tmp_path, address) as fleet:
        with patch.dict(os.environ, hanging(tmp_path, "aggregator.training.calibration_job")):
            fleet.start_aggregator(task)
        for name in names:
            data = write_digits(tmp_path / f"data-{name}", classes=[0, 1, 2, 3], each=40)
            fleet.start_device(name, data)
        job = fleet.aggregator_state / "training" / "head-2" / "job.json"
        fleet.wait_until("the calibration", job.is_file)
        fleet.kill("aggregator")
        assert [head["version"] for head in fleet.status()["heads"]] == [1]
        for starts in (2, 3):
            fleet.start_aggregator(task)
            fleet.wait_for_log("aggregator", "connected to the broker", times=starts)
            summary = fleet.wait_for(
                "evaluations of the calibrated head",
                lambda s: len(s["heads"]) == 2 and s["heads"][1]["held_out"]["devices"] == 3,
            )
            fleet.stop("aggregator")
        first, second = summary["heads"]
        assert (second["state"], second["metrics"]["calibrated_from"]) == ("current", 1)
        assert second["metrics"]["calibration_images"] == 3 * 4 * 8
        assert second["held_out"]["correct"] == first["held_out"]["correct"]
        assert [row["head"] for row in summary["devices"]] == [2, 2, 2]
        image = next((tmp_path / "data-a" / "0").glob("*.png"))
        predicted = fleet.predict("a", image)
        assert (predicted["head_version"], predicted["known"]) == (2, True)
        noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(noise).save(foreign := tmp_path / "foreign.png")
        assert fleet.predict("a", foreign)["answer"] == "unknown"
        assert fleet.log("aggregator").count("head calibrated version=2 of=1 held_out_images=96") == 1
