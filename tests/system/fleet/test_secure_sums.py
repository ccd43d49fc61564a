"""A fleet with a second operator on real processes: nobody sees a device's sums, and the head is that of all."""

import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from aggregator.heads.operator_commands import forget
from aggregator.intake.validation import read_message
from aggregator.security.identity import revoke_key
from aggregator.storage.open_store import open_store
from aggregator.storage.sum_lists import sums_of
from edge_client.agent.state import Mode
from edge_client.config import Settings
from edge_client.service.worker import Worker
from edge_client.storage.device_state import DeviceState
from edge_client.submission.private_submission import prepare_private
from protocol.errors import ConfigError
from protocol.statistics.noisy_sums import UNITS
from protocol.storage.keyfile import read_key
from protocol.wire.codec import decode, to_array
from protocol.wire.messages import Submission, TaskManifest, Tensors
from protocol.wire.signing import public_key
from protofleet.public_map import public_map
from tests.support.fleets.fleet import Fleet, write_digits, write_task
from tests.support.network.brokers import free_address, mosquitto

DEVICES, MIN_DEVICES, EACH, SIZE = 12, 8, 10, 12
PRIVATE = """
[privacy.dp]
epsilon = 8
map = "public.map"
max_epsilon = 10
[privacy.sums]
operator = "sums/operator.toml"
min_devices = 8
tolerance = 0.25
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with mosquitto(address := free_address(), tmp_path), Fleet(tmp_path, address) as fleet:
        yield fleet


def start_operator(fleet: Fleet, *options: str | Path) -> None:
    fleet.start(
        "operator",
        "sums_operator",
        *("run", "--state", fleet.root / "sums", "--broker", str(fleet.broker), "--fleet", "default"),
        *("--min-devices", str(MIN_DEVICES), *options),
    )


def prepared(fleet: Fleet, folder: Path) -> Path:
    """Make the second operator's keys, the public map and the task file."""
    subprocess.run([sys.executable, "-m", "sums_operator", "init", fleet.root / "sums"], check=True)
    task = write_task(folder, quorum=MIN_DEVICES, deadline_s=3600, tables=PRIVATE, algorithm="statistics")
    public = write_digits(folder / "public", classes=list(range(10)), start=140, each=10)
    made, _ = public_map(public, folder / "backbone-0.onnx", size=SIZE)
    (folder / "public.map").write_bytes(made.to_bytes())
    return task


def consent(fleet: Fleet) -> tuple[str, ...]:
    """Return the options with which an owner accepts the second operator."""
    card = tomllib.loads((fleet.root / "sums" / "operator.toml").read_text())
    return "--max-epsilon", "20", "--second-operator", card["seal_key"]


def start_devices(fleet: Fleet, numbers: range) -> None:
    for number in numbers:
        data = write_digits(
            fleet.root / f"data-{number}", classes=list(range(10)), start=EACH * number, each=EACH
        )
        fleet.start_device(f"device-{number}", data, "--once", *consent(fleet))


def own_sums(fleet: Fleet, name: str, manifest: TaskManifest, task: bytes) -> np.ndarray:
    """Return the noisy sums that a device has masked, int32, from its state: the same release has the same noise."""
    settings = Settings(
        broker=None,
        fleet="default",
        device_id=name,
        mode=Mode.SERVICE,
        data=fleet.root / f"data-{name.rpartition('-')[2]}",
        max_epsilon=20.0,
    )
    store = DeviceState(fleet.device_state(name))
    workspace = Worker(settings, store, emit=lambda _: None, show=None)._workspace
    prepared = prepare_private(workspace, task, manifest, lambda: False)
    counts, triangle = (to_array(prepared.tensors[part]) for part in ("counts", "second_moment"))
    store.close()
    return np.concatenate([counts, prepared.prototypes.ravel(), triangle])


def test_opened_sum_is_exactly_that_of_the_listed_devices(fleet: Fleet, tmp_path: Path) -> None:
    """A third of the devices is killed, each in another phase, and both operators are: nothing is asked twice."""
    task = prepared(fleet, tmp_path)
    fleet.start_aggregator(task)
    start_devices(fleet, range(DEVICES))
    fleet.kill("device-0")
    for name, phase in (("device-1", "computing features"), ("device-2", "submission built")):
        fleet.wait_for_log(name, phase)
        fleet.kill(name)
    fleet.wait_for_log("device-3", "submission received")
    fleet.kill("device-3")
    fleet.wait_for_log("aggregator", "sum requested from the second operator")
    fleet.kill("aggregator")  # the list is stored, and is not opened yet
    start_operator(fleet)
    fleet.wait_for_log("operator", "second operator started")
    fleet.kill("operator")
    start_operator(fleet)
    fleet.start_aggregator(task)
    summary = fleet.wait_for("the head", lambda s: s["heads"])
    assert summary["heads"][0]["metrics"]["onnx_max_difference"] <= 1e-4
    assert summary["refusals"] == []
    for number in range(4, DEVICES):
        fleet.wait_exit(f"device-{number}")
    with closing(open_store(fleet.aggregator_state)) as store:
        digest = store.served_task().digest
        lists, manifest = sums_of(store.facts, digest), store.blobs.read(digest)
        assert (lists.count, lists.pending) == (1, None)
        assert len(lists.devices) >= MIN_DEVICES
        data = store.blobs.read(bytes.fromhex(lists.total))
        total = to_array(decode(data, Tensors, max_bytes=len(data)).values["total"])
        decoded = decode(manifest, TaskManifest, max_bytes=len(manifest))
        expected = sum(own_sums(fleet, name, decoded, digest).astype(np.int64) for name in lists.devices)
        np.testing.assert_array_equal(total.view(np.int32), expected)
        with pytest.raises(ConfigError, match="it cannot be taken out"):
            forget(store, lists.devices[0])
        record = store.submissions.all(digest)[lists.devices[0]]
        message = read_message(store.blobs.read(record.entry.digest))
        assert isinstance(message, Submission)
        masked = to_array(message.tensors["counts"]).view(np.int32) / UNITS
        assert np.abs(masked).mean() > 1e6, "the aggregator has not seen the device's counts"


def test_device_that_comes_later_waits_for_a_list_of_its_own(fleet: Fleet, tmp_path: Path) -> None:
    """Its sum alone would be its own: the second operator would refuse it, and the aggregator does not ask."""
    task = prepared(fleet, tmp_path)
    start_operator(fleet)
    fleet.start_aggregator(task)
    start_devices(fleet, range(MIN_DEVICES))
    fleet.wait_for("the head", lambda s: s["heads"])
    shutil.copytree(tmp_path / "data-0", tmp_path / "data-late")
    fleet.start_device("late", tmp_path / "data-late", *consent(fleet))
    fleet.wait_for_log("aggregator", f"waiting for devices that are in no sum devices={MIN_DEVICES - 1}")
    summary = fleet.wait_for("its submission", lambda s: len(s["devices"]) == MIN_DEVICES + 1)
    assert [head["devices"] for head in summary["heads"]] == [MIN_DEVICES]


def test_device_that_the_second_operator_does_not_know_is_left_out(fleet: Fleet, tmp_path: Path) -> None:
    """The list is refused, the operator revokes the device, and the others' sum is opened without a restart."""
    task = prepared(fleet, tmp_path)
    fleet.start_aggregator(task)
    start_devices(fleet, range(MIN_DEVICES + 1))
    fleet.wait_for("all submissions", lambda s: s["submissions"] == MIN_DEVICES + 1)
    with closing(open_store(fleet.aggregator_state)) as store:
        pending = sums_of(store.facts, store.served_task().digest).pending
        assert pending is not None
        stranger = min(pending.members)
    names = [f"device-{number}" for number in range(MIN_DEVICES + 1)]
    keys = {name: public_key(read_key(fleet.device_state(name) / "signing.key")).hex() for name in names}
    del keys[stranger]
    known = tmp_path / "devices.txt"
    known.write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
    start_operator(fleet, "--devices", known)
    fleet.wait_for("the refusal", lambda s: s["sums"] and f"{stranger} is not in" in s["sums"]["problem"])
    with closing(open_store(fleet.aggregator_state)) as store:
        revoke_key(store, stranger, now_s=time.time())
    summary = fleet.wait_for("the head", lambda s: s["heads"])
    assert summary["heads"][0]["devices"] == MIN_DEVICES
    assert (summary["sums"]["devices"], summary["sums"]["requested"]) == (MIN_DEVICES, 0)
