"""The quarantine over trainings, releases and revocations; and with a running aggregator."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregator.coordination.round_state import DeviceDecisions
from aggregator.heads.next_head import update_quarantine
from aggregator.heads.operator_commands import release
from aggregator.intake.validation import Prototypes
from aggregator.storage.devices import REVOKED
from aggregator.storage.heads import HeadRecord
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.training.jobs import Result
from protocol.errors import ConfigError, StateError
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import digest_of, to_unsigned
from protocol.wire.messages import Submission
from protocol.wire.quantization import prototype_fields
from tests.support.fleets.aggregator_process import Device, aggregator, run_aggregator, write_task
from tests.support.graphs.backbones import without_metadata
from tests.support.messages.prototype_sets import fleet, flipped, honest
from tests.support.messages.submissions import SERVED, TASK
from tests.support.network.brokers import free_address


@pytest.fixture
def store(store: Store) -> Store:
    store.facts.put(SERVED)
    return store


def _keep(store: Store, version: int, *, quarantined: dict[str, str], warning: str = "") -> None:
    digests = {device: device.encode().hex() for device in "abc"}
    head = HeadRecord(
        *(version, TASK, bytes(32), 9, float(version), 1),
        members={device: digest for device, digest in digests.items() if device not in quarantined},
        metrics={},
        quarantined={device: digest for device, digest in digests.items() if device in quarantined},
    )
    update_quarantine(store, head, Result(metrics={}, quarantined=quarantined, warning=warning))


def test_every_training_updates_the_quarantine(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Devices that are no longer outliers leave it; each change is logged once."""
    caplog.set_level(logging.INFO)
    _keep(store, 1, quarantined={"a": "far off", "b": "far off"})
    assert [device for device in "abc" if f"device={device} reason=" in caplog.text] == ["a", "b"]
    caplog.clear()
    _keep(store, 2, quarantined={"a": "farther off"})
    assert "device quarantined" not in caplog.text
    assert "device no longer quarantined device=b" in caplog.text
    assert {device: (one.reason, one.since_s) for device, one in store.quarantine.all(TASK).items()} == {
        "a": ("farther off", 1.0)
    }
    _keep(store, 3, quarantined={}, warning="all of them are far off")
    assert store.quarantine.all(TASK) == {}
    assert "all of them are far off" in caplog.text


def test_release_outlives_trainings(store: Store) -> None:
    """Trainings that started before it do not quarantine the device again."""
    _keep(store, 1, quarantined={"a": "far off"})
    assert release(store, "a") == "released a: the next head after the start of the aggregator includes it"
    assert release(store, "a") == "a is already released"
    _keep(store, 2, quarantined={"a": "far off"})
    _keep(store, 3, quarantined={})
    assert store.decisions(TASK) == DeviceDecisions(released=frozenset("a"))


def test_revoked_device_stays_quarantined(store: Store) -> None:
    """No training releases it; only a new enrollment does."""
    store.quarantine.add(TASK, "a", reason=REVOKED, now_s=1.0)
    _keep(store, 1, quarantined={})
    _keep(store, 2, quarantined={"a": "far off"})
    assert store.decisions(TASK) == DeviceDecisions(quarantined=frozenset("a"))
    with pytest.raises(ConfigError, match="a is revoked: enroll it again"):
        release(store, "a")


def test_only_quarantined_devices_can_be_released(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a is not quarantined: `aggregator status` lists"):
        release(store, "a")
    with pytest.raises(StateError, match="start `aggregator run`"):
        release(open_store(tmp_path / "new"), "a")


def _upload(broker: BrokerAddress, name: str, part: Prototypes) -> None:
    with Device(broker, name) as device:
        device.aggregator_is("online")
        message = Submission(
            task=digest_of(device.task()),
            sequence=1,
            **prototype_fields(part.values.astype(np.float16)),
            labels=to_unsigned(part.labels),
            counts=to_unsigned(part.counts),
            images=int(part.counts.sum()),
        )
        assert device.upload(message).status == "received"


def _has_files_of(version: int) -> Callable[[dict[str, Any]], bool]:
    """Return a condition of a status: this head is current, and its file is written."""
    return lambda summary: summary["rollout"]["current"] == version and summary["head_path"] is not None


def test_device_with_flipped_labels_is_quarantined_released_and_forgotten(tmp_path: Path) -> None:
    """One of six; status shows it, and the running aggregator applies the commands.

    The head after `aggregator forget` is, byte for byte, that of a fleet that never had the device.
    """
    task = write_task(tmp_path, "quorum = 6\ndeadline_s = 1000\n[training]\nepochs = 1")
    broker = free_address()
    with aggregator(task, broker, "--embedded-broker") as daemon:
        for device, part in {**fleet(5), "malicious": flipped(honest(9))}.items():
            _upload(broker, device, part)
        summary = daemon.until(_has_files_of(1))
        assert (summary["heads"][0]["devices"], summary["waiting"]) == (5, 0)
        assert [one["device"] for one in summary["quarantine"]] == ["malicious"]
        assert "device=malicious reason=\"class '" in daemon.log()
        without = without_metadata((daemon.state / "head.onnx").read_bytes())
        done = run_aggregator("release", "malicious", "--state", str(daemon.state))
        assert (done.returncode, done.stdout) == (0, "released malicious: the next head includes it\n")
        summary = daemon.until(_has_files_of(2))
        assert summary["heads"][1]["devices"] == 6
        assert summary["quarantine"][0]["released_s"] is not None
        assert without_metadata((daemon.state / "head.onnx").read_bytes()) != without
        done = run_aggregator("forget", "malicious", "--state", str(daemon.state))
        assert done.stdout.splitlines()[:2] == [
            "forgot malicious: its submissions are deleted",
            "head 2 is made again without it now; until then it stays in use",
        ]
        summary = daemon.until(_has_files_of(3))
        assert (summary["submissions"], summary["heads"][2]["devices"], summary["quarantine"]) == (5, 5, [])
        assert without_metadata((daemon.state / "head.onnx").read_bytes()) == without
        done = run_aggregator("rollback", "2", "--state", str(daemon.state))
        assert "head 2 cannot be used any more: its files were deleted" in done.stderr
