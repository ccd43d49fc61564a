"""One closed fleet for the whole suite: a broker with two doors, an aggregator, and honest devices that have a head.

One door of the broker is as `aggregator enroll-broker` makes it: certificates, and an access list. The other one has
neither: who comes in there is the broker's own operator, or has got past it. Both lead to the same topics.
"""

import getpass
import json
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from aggregator.security.enrollment import revoke
from aggregator.security.mosquitto_config import FOLDER, LOG
from aggregator.status import report
from aggregator.storage.store import Store
from edge_client.storage.device_state import DeviceState
from edge_client.storage.facts import Heads
from protocol.errors import StateError
from protocol.storage.keyfile import read_key
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import MAX_FRAME_BYTES, Frame, HeadManifest, Signed, Submission
from protocol.wire.signing import open_manifest, sign_frame
from protocol.wire.topics import DeviceChannel, FleetChannel, device_topic, fleet_topic
from protocol.wire.transfer import Assembly, frames_of
from tests.support.brokers import free_address, start_mosquitto
from tests.support.closed_fleet import FLEET, Closed
from tests.support.fleet_processes import Fleet
from tests.system.attacks.hostile import Client, Witness

HONEST = ("shed-1", "shed-2")
"""Devices that have uploaded, and use the head."""
HOSTILE = "mallory"
"""A device that is enrolled, and not honest."""
REVOKED = "eve"
FRESH, LATE = "fresh", "late"
"""Honest devices that begin later."""
PATIENCE_S = 240.0
MAX_MEMORY_BYTES = 1024**3
"""Of the aggregator, torch's libraries included."""
MAX_STATE_BYTES = 160 * 1024**2
"""Of its folder."""


@dataclass(frozen=True)
class Standing:
    """What no attack may change."""

    head: str
    submissions: dict[str, str]
    used: dict[str, str]
    """The head that each honest device has in use."""


class Ground:
    """The fleet.

    Args:
        root: a folder of its own.
        task: the task file.
        data: a folder of images for each honest device.
    """

    def __init__(self, root: Path, task: Path, data: dict[str, Path]) -> None:
        self.root = root
        self.data = data
        self.task_file = task
        self.closed = Closed(root, free_address())
        self.open = free_address()
        self.fleet = Fleet(root, self.closed.broker)
        self.broker_log = root / f"mosquitto-{self.open.port}.log"
        self.early: list[tuple[str, bytes]] = []
        """What was said while the fleet got its head, also by an aggregator that has started again since."""
        for device in (*HONEST, HOSTILE, REVOKED, FRESH, LATE):
            self.closed.enrol(device)
        revoke(self.closed.store, REVOKED)
        self.said: list[str] = []
        """What attacks have measured, for whoever looks at the run."""
        self._broker: subprocess.Popen[bytes] | None = None
        self._aggregator: subprocess.Popen[bytes] | None = None

    # How it begins and ends.

    def start(self) -> None:
        """Let the fleet come to a head, and its aggregator start once more."""
        self.closed.hand_over()
        self.start_broker()
        with Witness(self.open) as witness:
            self.start_aggregator()
            for name in HONEST:
                self.start_device(name, data=self.data[name])
            self.until("a head in use", self.is_settled)
            witness.settle()
            self.stop_aggregator()
            self.start_aggregator()
            self.until("the aggregator", lambda: self.log("aggregator").count("connected to the broker") == 2)
            self.until("the head, told again", lambda: len(witness.said(fleet_topic(FLEET, "head"))) > 2)
            witness.settle()
            self.early = [(heard.topic, heard.payload) for heard in witness.heard if not heard.retained]
        self.standing = self.stand()

    def start_broker(self) -> None:
        """Run mosquitto with both doors."""
        text = (self.root / "broker" / "mosquitto.conf").read_text(encoding="utf-8")
        text = re.sub(r"(?m)^listener .*$", f"listener {self.closed.broker.port} 127.0.0.1", text)
        text = text.replace(FOLDER, str(self.root / "broker")).replace("/var/lib/mosquitto/", f"{self.root}/")
        text = text.replace(f"file {LOG}", "stderr")
        options = (
            f"per_listener_settings true\nallow_anonymous true\nuser {getpass.getuser()}\n{text}\n"
            f"pid_file {self.root}/mosquitto.pid\n"
        )
        self._broker = start_mosquitto(self.open, self.root, options=options)

    def start_aggregator(self) -> None:
        """Run the daemon."""
        self._aggregator = self.fleet.start(
            *("aggregator", "aggregator.cli", "run", "--task", self.task_file, "--state", self.closed.state),
            *("--broker", str(self.closed.broker), "--tls", "--verbose"),
        )

    def stop_aggregator(self) -> None:
        """End it as a service manager does."""
        if self._aggregator is not None:
            self._aggregator.send_signal(signal.SIGTERM)
            self.fleet.wait_exit(self._aggregator)

    def start_device(
        self, name: str, *, data: Path, enrollment: str = "", state: str = "", log: str = ""
    ) -> subprocess.Popen[bytes]:
        """Run the device program with an enrollment."""
        return self.fleet.start(
            *(
                log or name,
                "edge_client.cli",
                "--enrollment",
                self.root / (enrollment or name),
                "--data",
                data,
            ),
            *("--state", self.state_of(state or name), "--threads", "1", "--workers", "1"),
            *("--rescan-s", "0.5", "--verbose"),
        )

    def freeze(self) -> None:
        """Let the aggregator stand still."""
        assert self._aggregator is not None
        self._aggregator.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._aggregator is not None
        self._aggregator.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Leave no process behind."""
        self.fleet.stop()
        if self._broker is not None:
            self._broker.terminate()
            self._broker.wait(timeout=30)
        self.closed.store.close()

    # Who is there.

    def mallory(self, **options: Any) -> Client:
        """The dishonest device, by the door that has a lock."""
        return Client(self.closed.broker, self.closed.access(HOSTILE), **options)

    def client_of(self, device: str) -> Client:
        """Whoever has a device's folder."""
        return Client(self.closed.broker, self.closed.access(device))

    def inside(self, **options: Any) -> Client:
        """Whoever has got past the broker, or runs it."""
        return Client(self.open, **options)

    def key(self, device: str) -> bytes:
        """A device's private key."""
        return read_key(self.root / device / "signing.key")

    def aggregators_key(self) -> bytes:
        """The aggregator's private key."""
        return read_key(self.closed.state / "identity" / "signing.key")

    # What was said.

    def told(self, channel: FleetChannel) -> list[bytes]:
        """What the aggregator has said to the fleet, each of its words signed, the oldest first."""
        topic = fleet_topic(FLEET, channel)
        return [payload for said, payload in self.early if said == topic and payload]

    def frames(self, device: str = HONEST[0]) -> list[bytes]:
        """The frames with which a device has uploaded its submission."""
        said = [payload for topic, payload in self.early if topic == device_topic(FLEET, device, "up")]
        digest = bytes.fromhex(self.standing.submissions[device])
        return [payload for payload in said if frame_of(payload).digest == digest]

    def submission(self, device: str = HONEST[0]) -> Submission:
        """What a device has uploaded."""
        frames = [frame_of(payload) for payload in self.frames(device)]
        assembly = Assembly(frames[0].digest, frames[0].size_bytes)
        for frame in frames:
            assembly.add(frame)
        return decode(assembly.payload(), Submission, max_bytes=2**24)

    def forged_frame(self, device: str, *, signer: str, data: bytes = b"forged") -> bytes:
        """A whole transfer of one frame under a device's name, signed by somebody with a key of their own."""
        frame = next(frames_of(data, digest=digest_of(data)))
        return encode(sign_frame(frame, key=self.key(signer), fleet=FLEET, device=device))

    def refused_inside(self, said: Iterable[tuple[str, bytes]], *, reason: str) -> Iterator[bool]:
        """Send frames under names where the broker stops nobody, and wait until each was refused."""
        with self.inside() as operator:
            for device, payload in said:
                with self.counted(reason, device):
                    assert operator.publish(own(device, "up"), payload)
                yield False

    def head_manifest(self) -> tuple[Signed, HeadManifest]:
        """The head that was told last, signed and read."""
        signed = open_manifest(self.told("head")[-1], fleet=FLEET, channel="head")
        return signed, decode(signed.body, HeadManifest, max_bytes=2**17)

    def restore(self, channel: FleetChannel) -> None:
        """Have the broker keep again what the aggregator has said, or nothing where that is nothing."""
        with self.inside() as operator:
            told = self.told(channel)
            operator.publish(fleet_topic(FLEET, channel), told[-1] if told else b"", retain=True)

    # What is seen from outside.

    def state_of(self, device: str) -> Path:
        """A device's state folder."""
        return self.root / "devices" / device

    def log(self, name: str) -> str:
        """What a process has said."""
        file = self.root / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def status(self) -> dict[str, Any]:
        """What `aggregator status --json` shows; empty before there is anything."""
        try:
            store = Store(self.closed.state, read_only=True)
        except StateError:
            return {}
        try:
            return report(store)
        except StateError:
            return {}
        finally:
            store.close()

    def refusals(self) -> Counter[tuple[str, str]]:
        """Return what the broker's log and status count: reason and name, `by NAME` where a device has refused."""
        summary = self.status()
        log = self.broker_log.read_text(errors="replace")
        counts: Counter[tuple[str, str]] = Counter()
        counts["denied", HOSTILE] = log.count(f"Denied PUBLISH from {HOSTILE}")
        counts["no certificate", "?"] = log.count("SSL routines::")
        for row in summary.get("refusals", []):
            counts[row["reason"], row["device"]] += row["count"]
        for device in summary.get("devices", []):
            for reason, count in device["refusals"].items():
                counts[reason, f"by {device['device']}"] += count
        return counts

    def names(self) -> set[str]:
        """Under which names somebody is known to the aggregator."""
        return {row["device"] for row in self.status()["devices"]}

    @contextmanager
    def counted(self, reason: str, who: str) -> Iterator[None]:
        """Do something, and wait until status has counted one more of a kind."""
        before = self.refusals()[reason, who]
        yield
        self.until(f"{reason} of {who}", lambda: self.refusals()[reason, who] > before)

    def disbelieved(self, device: str) -> int:
        """How often a device has said that it does not believe something."""
        return self.log(device).count("ignored a message on")

    def memory_bytes(self) -> int:
        """Resident memory of the aggregator."""
        assert self._aggregator is not None
        return int(psutil.Process(self._aggregator.pid).memory_info().rss)

    def state_bytes(self) -> int:
        """What the aggregator's folder takes on the disk."""
        files = (file for file in self.closed.state.rglob("*") if file.is_file())
        return sum(_size(file) for file in files)

    def keeps(self, part: bytes) -> bool:
        """Whether some bytes stand in a file of the aggregator's."""
        files = [file for file in self.closed.state.rglob("*") if file.is_file()]
        return any(part in file.read_bytes() for file in files)

    def is_settled(self) -> bool:
        """Whether all honest devices use the head and have said how it does."""
        heads = self.status().get("heads", [])
        return bool(heads) and heads[-1]["held_out"]["devices"] == len(HONEST)

    def stand(self) -> Standing:
        """What no attack may change, as it is now."""
        store = Store(self.closed.state, read_only=True)
        try:
            task = store.served_task().digest
            rows = store.submissions.all(task)
            head = store.heads.all(task)[-1].digest.hex()
        finally:
            store.close()
        used = {name: self.uses(name) for name in HONEST}
        return Standing(head, {name: rows[name].entry.digest.hex() for name in HONEST}, used)

    def uses(self, device: str) -> str:
        """Hex digest of the head that a device has in use; empty if it has none."""
        try:
            installed = DeviceState(self.state_of(device), read_only=True).get(Heads).installed
        except StateError:
            return ""
        return "" if installed is None else installed.head.hex()

    def submitted(self, device: str) -> str:
        """Hex digest of a device's submission; empty if none stands."""
        store = Store(self.closed.state, read_only=True)
        try:
            rows = store.submissions.all(store.served_task().digest)
            return rows[device].entry.digest.hex() if device in rows else ""
        finally:
            store.close()

    def check(self) -> None:
        """See that the fleet is as it was, that everybody is at work, and that nothing grows without bound."""
        assert self.stand() == self.standing
        assert set(self.standing.used.values()) == {self.standing.head}
        for process in self.fleet.processes:
            alive = process.poll() is None
            expected = process.args[-1:] if isinstance(process.args, list) else []
            assert alive or process.returncode in {0, 1, -9, -15}, f"{expected}\n{self.last_words()}"
        assert self._aggregator is not None
        assert self._aggregator.poll() is None, self.last_words()
        online = {row["device"]: row["state"] for row in self.status()["devices"]}
        assert all(online[name] == "online" for name in HONEST), self.last_words()
        assert self.memory_bytes() < MAX_MEMORY_BYTES
        assert self.state_bytes() < MAX_STATE_BYTES

    def until(self, what: str, holds: Callable[[], Any], *, pause_s: float = 0.05) -> None:
        """Wait for something; fails with everybody's last words."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"never came: {what}\n{self.last_words()}"
            time.sleep(pause_s)

    def say(self, text: str) -> None:
        """Keep a line for whoever looks at the run."""
        self.said.append(text)

    def last_words(self) -> str:
        """The end of every log, and the aggregator's state."""
        logs = sorted(self.root.glob("*.log"))
        ends = [
            f"== {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-25:])
            for file in logs
        ]
        return "\n".join([*ends, json.dumps(self.status(), indent=1)])


def own(device: str, channel: DeviceChannel) -> str:
    """A device's topic in this fleet."""
    return device_topic(FLEET, device, channel)


def shared(channel: FleetChannel) -> str:
    """A topic of the whole fleet."""
    return fleet_topic(FLEET, channel)


def frame_of(payload: bytes) -> Frame:
    """A frame as it travels, read."""
    return decode(payload, Frame, max_bytes=MAX_FRAME_BYTES)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
