"""One small fleet behind two proxies, as processes, and the question that every test ends with: is it all there?"""

import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
from PIL import Image
from sklearn.datasets import load_digits

from aggregator.status import report
from aggregator.storage.store import Store
from edge_client.storage.device_state import DeviceState
from edge_client.storage.facts import Secret
from protocol.errors import StateError
from protocol.wire.codec import digest_of
from tests.support.brokers import free_address
from tests.support.graphs import tiny_backbone
from tests.support.network_proxy import Proxy
from tests.system.faults.broker import Mosquitto
from tests.system.faults.table import Reference, Row
from tests.system.faults.watch import Transfer, Watch

DEVICES = ("device-0", "device-1", "device-2")
LATECOMER = "latecomer"
"""A device that is no part of a fleet at its start."""
FEATURE_SIZE = 768
LEAST_SUBMISSION_BYTES = 100_000
"""A device's submission is larger, its evaluation smaller."""
PATIENCE_S = 400.0

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


@dataclass
class Fleet:
    """The processes of one test.

    Args:
        root: of all states and logs.
        world: the folder of task and images.
        broker: not started yet.
        say: prints a line of progress.
        seed: of every chance in the test.
        reference: what it has to come to in the end.
    """

    root: Path
    world: Path
    broker: Mosquitto
    say: Callable[[str], None]
    seed: int
    reference: Reference
    without_mqtt5: bool = False
    watch: Watch = field(default_factory=Watch)
    delivered: Watch = field(default_factory=Watch)
    """What has crossed between broker and aggregator."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    abandoned: threading.Event = field(default_factory=threading.Event)
    """Nobody waits for the outcome any more."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        # Devices and aggregator have a network each.
        self.net = self._proxy(self.watch)
        self.aggregator_net = self._proxy(self.delivered)

    def _proxy(self, watch: Watch) -> Proxy:
        return Proxy(
            free_address(),
            self.broker.address,
            seed=self.seed,
            without_mqtt5=self.without_mqtt5,
            on_seen=watch.see,
        )

    def __enter__(self) -> Self:
        self.broker.start()
        self.net.__enter__()
        self.aggregator_net.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)
        self.net.__exit__()
        self.aggregator_net.__exit__()
        self.broker.stop()

    # Processes.

    def start(self, *names: str) -> None:
        """Start devices by name, the aggregator, or without a name all of them."""
        for name in names or ("aggregator", *DEVICES):
            self.processes[name] = self._start(name)
            self.starts[name] += 1

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        state = ("--state", self.root / name)
        command: tuple[str | Path, ...]
        if name == "aggregator":
            task = self.world / "task.toml"
            command = (
                "aggregator.cli",
                "run",
                "--task",
                task,
                *state,
                "--broker",
                str(self.aggregator_net.address),
            )
        else:
            if not self.starts[name]:  # the same shuffles as in the reference, and the same head of them
                DeviceState(self.root / name).set(Secret(digest_of(name.encode())))
            command = ("edge_client.cli", "--broker", str(self.net.address), "--device-id", name, *state)
            command = (*command, "--data", self.world / name, "--threads", "1", "--workers", "1")
        with (self.root / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *map(str, command)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self, name: str, *, with_children: bool = True) -> None:
        """End a process with SIGKILL, and what it has on its way with it."""
        process = self.processes.pop(name)
        children = psutil.Process(process.pid).children() if with_children and process.poll() is None else []
        process.kill()
        process.wait()
        net, part = (self.aggregator_net, "") if name == "aggregator" else (self.net, f"-{name}-")
        net.cut(part)
        for child in children:
            child.kill()

    def freeze(self, name: str, seconds: float) -> None:
        """Let a process do nothing for a while."""
        self.processes[name].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.processes[name].send_signal(signal.SIGCONT)

    def log(self, name: str) -> str:
        """What a process has said."""
        file = self.root / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    # What is seen from outside.

    def status(self) -> dict[str, Any]:
        """What the aggregator has on its disk; nothing before it has begun."""
        try:
            store = Store(self.root / "aggregator", read_only=True)
        except StateError:
            return {}
        try:
            return report(store)
        except StateError:
            return {}
        finally:
            store.close()

    def submissions(self) -> dict[tuple[str, bytes], Transfer]:
        """The submissions that devices have begun to upload, by device and digest."""
        return self.watch.submissions(least_bytes=LEAST_SUBMISSION_BYTES)

    def uploads(self, name: str = "") -> bool:
        """Whether a device, or any, is within the transfer of a submission."""
        return any(
            not transfer.received for (device, _), transfer in self.submissions().items() if name in device
        )

    def until_frames(self, watch: Watch, name: str | None = None, *, head: str | None = None) -> None:
        """Wait for further frames: of submissions, or of the head with that digest.

        With the name of a process, it has to have come online since it was started, and with a device's, they are
        its own.
        """
        if name is not None:
            self.until(f"{name} online", lambda: self._times_online(name) >= self.starts[name])
        device = name if name in DEVICES else None

        def count() -> int:
            return watch.frames_down(head) if head is not None else watch.frames_up(device)

        before = count()
        self.until(f"frames that cross for {name}", lambda: count() > before, pause_s=0.005)

    def _times_online(self, name: str) -> int:
        return self.log(name).count(" connected to ")

    def head(self) -> str | None:
        """Hex digest of the first head, if it was made."""
        heads = self.status().get("heads", [])
        return str(heads[0]["sha256"]) if heads else None

    def until(self, what: str, holds: Callable[[], Any], *, pause_s: float = 0.02) -> None:
        """Wait for something; fails with everybody's last words."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            for name, process in list(self.processes.items()):
                assert process.poll() is None, f"{name} has ended, {process.returncode}\n{self.last_words()}"
            assert not self.abandoned.is_set(), "the run was ended"
            assert time.monotonic() < deadline, f"never came: {what}\n{self.last_words()}"
            time.sleep(pause_s)

    def last_words(self) -> str:
        """The end of every log, and the aggregator's state."""
        logs = sorted(self.root.glob("*.log"))
        ends = [
            f"== {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-25:])
            for file in logs
        ]
        return "\n".join([*ends, json.dumps(self.status(), indent=1)])

    def moment(self, longest_s: float, chance: random.Random | None = None) -> None:
        """Wait for a random time."""
        time.sleep((chance or self.chance).uniform(0, longest_s))

    # How it ends.

    def settle(self) -> None:
        """Without further faults, wait until every device has uploaded, has the head and has said how it does."""
        self.net.calm()
        self.aggregator_net.calm()
        self.until("a head that every device has evaluated", self.is_settled, pause_s=0.1)

    def is_settled(self) -> bool:
        """Whether every device has evaluated the newest head."""
        summary = self.status()
        heads = summary.get("heads", [])
        return bool(heads) and heads[-1]["held_out"]["devices"] == len(self.reference.prototypes)

    def check(self, row: Row) -> None:
        """Compare what has become of a settled fleet with a run without faults."""
        words, reference = self.last_words(), self.reference
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

    def account(self, fault: str, provoked: int) -> Row:
        """Count what was uploaded, and what became of it, by the aggregator's disk, its newest head and its log."""
        prototypes = self.reference.prototypes
        sent = set(self.submissions())
        store = Store(self.root / "aggregator", read_only=True)
        try:
            task = store.served_task().digest
            standing = {
                (name, row.entry.digest): row.prototypes for name, row in store.submissions.all(task).items()
            }
            head = store.heads.all(task)[-1]
        finally:
            store.close()
        members = {(name, bytes.fromhex(digest)) for name, digest in head.members.items()}
        whole = {key for key in sent if standing.get(key) == prototypes.get(key[0]) and key in members}
        twice = {key for key in whole if self.times_taken(key[0]) > 1}
        extra = head.prototypes - sum(prototypes.values())
        return Row(
            fault, provoked, len(sent), len(whole - twice), len(sent - whole), max(len(twice), extra > 0)
        )

    def times_taken(self, name: str) -> int:
        """How often the aggregator has said that it counts a submission of a device."""
        return len(
            re.findall(rf"^\S+ {name}: \d+ prototypes of \d+ images", self.log("aggregator"), re.MULTILINE)
        )

    def device_status(self, name: str) -> dict[str, Any]:
        """What `edge-client status --json` says of a device."""
        state = str(self.root / name)
        command = [sys.executable, "-m", "edge_client.cli", "status", "--json", "--state", state]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        summary: dict[str, Any] = json.loads(done.stdout)
        return summary
