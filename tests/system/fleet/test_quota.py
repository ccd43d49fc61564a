"""A fleet over its quota, with devices as processes."""

from pathlib import Path

from protocol.mqtt.reconnecting_session import BrokerAddress
from tests.support.fleets.fleet import QUICK, Fleet, accepted_submissions, write_digits, write_task
from tests.support.network.brokers import mosquitto, needs_mosquitto


@needs_mosquitto
def test_device_over_the_quota_logs_it_and_uploads_once_it_is_raised(
    tmp_path: Path, address: BrokerAddress
) -> None:
    """By itself, after the aggregator's restart; until then the other device's upload counts alone."""

    def task(devices: int) -> Path:
        return write_task(tmp_path, quorum=9, tables=f"{QUICK}[limits]\nmax_devices = {devices}\n")

    with mosquitto(address, tmp_path), Fleet(tmp_path, address) as fleet:
        fleet.start_aggregator(task(1))
        fleet.start_device("first", write_digits(tmp_path / "a", classes=[0, 1]))
        fleet.wait_for("the first upload", lambda status: status["submissions"] == 1)
        fleet.start_device("second", write_digits(tmp_path / "b", classes=[1, 2]))
        text = (
            "the fleet has as many devices as limits.max_devices allows (1), and second would be another one"
        )
        fleet.wait_for_log("second", f"the aggregator refused to send backbone-0.onnx (quota): {text}")
        status = fleet.wait_for("the refusal", lambda status: status["refusals"])
        assert {row["reason"] for row in status["refusals"]} == {"quota"}
        assert status["quotas"]["devices"] == {"used": 1, "limit": 1}
        fleet.stop("aggregator")
        fleet.start_aggregator(task(2))
        fleet.wait_for("the second upload", lambda status: status["submissions"] == 2)
        assert sorted(name for name, _ in accepted_submissions(fleet.log("aggregator"))) == [
            "first",
            "second",
        ]
