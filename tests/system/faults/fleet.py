"""A small fleet behind two proxies, and the comparison with a fleet without faults that ends every test."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Self

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from aggregator.storage.store import Store
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import Secret
from protocol.wire.codec import digest_of
from tests.support.brokers import Mosquitto, free_address
from tests.support.fleet import Fleet, accepted_submissions
from tests.support.graphs import tiny_backbone
from tests.support.network_proxy import Proxy
from tests.system.faults.watch import Transfer, Watch
from tests.system.tables import FaultRow, Reference

DEVICES = ("device-0", "device-1", "device-2")
LATECOMER = "latecomer"
"""A device that joins later."""
FEATURE_SIZE = 768
LEAST_SUBMISSION_BYTES = 100_000
"""A device's submission is larger, its evaluation smaller."""

CONNECTED = "connected to the broker"
"""Logged by device and aggregator each time that they reach the broker."""

_TASK = """
classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
backbones = ["backbone.onnx"]
quorum = 3
deadline_s = 100000
retrain_after = 1
[client]
batch_size = 1
min_images = 1
[training]
epochs = 2
device = "cpu"
"""


def write_world(folder: Path) -> None:
    """Write the task with its backbone, and each device's images: a third of the handwritten digits, or a tenth."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "backbone.onnx").write_bytes(tiny_backbone(feature_size=FEATURE_SIZE))
    (folder / "task.toml").write_text(_TASK)
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        owners = (DEVICES[number % len(DEVICES)], *((LATECOMER,) if number % 10 == 0 else ()))
        for owner in owners:
            place = folder / owner / str(label)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 15.9).astype(np.uint8)).save(place / f"{number}.png")


class FaultyFleet(Fleet):
    """A fleet whose devices and whose aggregator reach the broker through a proxy each.

    Args:
        root: of all states and logs.
        world: the folder of task and images.
        mosquitto: the broker, not started yet.
        log_progress: called with lines about what is done to it.
        seed: of every random choice in the test.
        reference: what a fleet without faults comes to.
        without_mqtt5: the proxies refuse MQTT 5.
        abandoned: set when the test run has ended.
    """

    def __init__(
        self,
        root: Path,
        world: Path,
        mosquitto: Mosquitto,
        *,
        log_progress: Callable[[str], None],
        seed: int,
        reference: Reference,
        without_mqtt5: bool = False,
        abandoned: threading.Event | None = None,
    ) -> None:
        def proxy(watch: Watch) -> Proxy:
            return Proxy(
                free_address(),
                mosquitto.address,
                seed=seed,
                without_mqtt5=without_mqtt5,
                on_seen=watch.see,
            )

        self.watch = Watch()
        """Transfers between the devices and the broker."""
        self.delivered = Watch()
        """Transfers between the broker and the aggregator."""
        self.net, self.aggregator_net = proxy(self.watch), proxy(self.delivered)
        super().__init__(root, self.aggregator_net.address, device_broker=self.net.address)
        self.world = world
        self.without_mqtt5 = without_mqtt5
        self.mosquitto = mosquitto
        self.log_progress = log_progress
        self.seed = seed
        self.reference = reference
        self.random = random.Random(seed)
        self._abandoned = abandoned or threading.Event()
        self._expected: set[str] = set()

    def __enter__(self) -> Self:
        self.mosquitto.start()
        self.net.__enter__()
        self.aggregator_net.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._expected):
            self.kill(name)
        self.net.__exit__()
        self.aggregator_net.__exit__()
        self.mosquitto.stop()

    # Processes.

    def run(self, *names: str) -> None:
        """Start devices by name, the aggregator, or without a name all of them."""
        for name in names or ("aggregator", *DEVICES):
            if name == "aggregator":
                self.start_aggregator(self.world / "task.toml")
            else:
                if not self.starts[name]:  # the same shuffles as in the reference, and the same head of them
                    DeviceState(self.device_state(name)).set(Secret(digest_of(name.encode())))
                self.start_device(name, self.world / name)
            self._expected.add(name)

    def kill(self, name: str, *, with_children: bool = True) -> None:
        """End a process with SIGKILL; what it has on its way is lost too."""
        self._expected.discard(name)
        super().kill(name, with_children=with_children)
        net, part = (self.aggregator_net, "") if name == "aggregator" else (self.net, f"-{name}-")
        net.cut(part)

    def freeze(self, name: str, seconds: float) -> None:
        """Pause a process for a while."""
        self.pause(name)
        time.sleep(seconds)
        self.resume(name)

    def check(self) -> None:
        """Raise if a process has ended by itself, or the test run is over."""
        for name in list(self._expected):
            code = self.processes[name].poll()
            assert code is None, f"{name} has ended, {code}\n{self.diagnostics()}"
        assert not self._abandoned.is_set(), "the run was ended"

    # What is seen from outside.

    def submissions(self) -> dict[tuple[str, bytes], Transfer]:
        """The submissions that devices have begun to upload, by device and digest."""
        return self.watch.submissions(least_bytes=LEAST_SUBMISSION_BYTES)

    def uploads(self, name: str = "") -> bool:
        """Return whether a device, or any, is within the transfer of a submission."""
        return any(
            not transfer.received for (device, _), transfer in self.submissions().items() if name in device
        )

    def wait_for_frames(self, watch: Watch, name: str | None = None, *, head: str | None = None) -> None:
        """Wait for further frames: of submissions, or of the head with that digest.

        With the name of a process, it has to have come online since it was started, and with a device's, they are
        its own.
        """
        if name is not None:
            self.wait_for_log(name, CONNECTED, times=self.starts[name])
        device = name if name in DEVICES else None

        def count() -> int:
            return watch.frames_down(head) if head is not None else watch.frames_up(device)

        before = count()
        self.wait_until(f"frames that cross for {name}", lambda: count() > before, pause_s=0.005)

    def head(self) -> str | None:
        """Hex digest of the first head, if it was made."""
        heads = self.status().get("heads", [])
        return str(heads[0]["sha256"]) if heads else None

    def sleep_up_to(self, longest_s: float, chance: random.Random | None = None) -> None:
        """Sleep for a random time."""
        time.sleep((chance or self.random).uniform(0, longest_s))

    # How it ends.

    def settle(self) -> None:
        """Without further faults, wait until every device has uploaded and has evaluated the newest head."""
        self.net.calm()
        self.aggregator_net.calm()
        self.wait_until("a head that every device has evaluated", self.is_settled, pause_s=0.1)

    def is_settled(self) -> bool:
        """Return whether every device has evaluated the newest head."""
        heads = self.status().get("heads", [])
        return bool(heads) and heads[-1]["held_out"]["devices"] == len(self.reference.prototypes)

    def compare(self, row: FaultRow) -> None:
        """Compare a settled fleet with a run without faults."""
        words, reference = self.diagnostics(), self.reference
        assert (row.once, row.lost, row.twice) == (row.sent, 0, 0), f"{row}\n{words}"
        assert row.sent == len(reference.prototypes), f"{row}\n{words}"
        summary = self.status()
        assert [head["sha256"] for head in summary["heads"]] == [*reference.heads], words
        assert {d["device"]: d["prototypes"] for d in summary["devices"]} == reference.prototypes, words
        with ThreadPoolExecutor() as pool:
            names = list(reference.prototypes)
            for name, kept in zip(names, pool.map(self.device_status, names), strict=True):
                assert kept["received"], f"{name}\n{words}"
                assert kept["head"]["head"] == reference.heads[-1], f"{name}\n{words}"

    def account(self, fault: str, provoked: int) -> FaultRow:
        """Count what was uploaded, and what became of it, by the aggregator's disk, its newest head and its log."""
        prototypes = self.reference.prototypes
        sent = set(self.submissions())
        with closing(Store(self.aggregator_state, read_only=True)) as store:
            task = store.served_task().digest
            stored = {
                (name, row.entry.digest): row.prototypes for name, row in store.submissions.all(task).items()
            }
            head = store.heads.all(task)[-1]
        members = {(name, bytes.fromhex(digest)) for name, digest in head.members.items()}
        whole = {key for key in sent if stored.get(key) == prototypes.get(key[0]) and key in members}
        twice = {key for key in whole if self.times_accepted(key[0]) > 1}
        extra = head.prototypes - sum(prototypes.values())
        return FaultRow(
            fault, provoked, len(sent), len(whole - twice), len(sent - whole), max(len(twice), extra > 0)
        )

    def times_accepted(self, name: str) -> int:
        """Count how often the aggregator has logged a submission of a device as counted."""
        return sum(device == name for device, _ in accepted_submissions(self.log("aggregator")))
