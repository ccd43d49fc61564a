"""Two of each role of a fleet past one machine, and devices, all on this machine."""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from examples.quickstart.folder import FLEET, Folder
from protocol.errors import ProtofleetError
from protocol.mqtt.tls import BrokerAddress
from tests.support.fleets.fleet import Fleet, accepted_submissions
from tests.support.network.brokers import rotated

COORDINATORS = ("coordinator-1", "coordinator-2")
RECEIVERS = ("receiver-1", "receiver-2")
TRAINERS = ("trainer-1", "trainer-2")
PROXY = "s3"
CONNECTED = "connected to the broker"
READY = f"{CONNECTED}|standby|worker ready|listening"
"""Pattern of a log line after which a program can be used."""

Service = tuple[Callable[[], None], Callable[[], None]]
"""Functions that kill a service and start it again."""


def role_state(folder: Folder, name: str) -> Path:
    """Return the state folder of a role."""
    return folder.root / "roles" / name


def copy_keys(folder: Folder, name: str) -> None:
    """Give a role the first coordinator's keys, which an operator copies or mounts."""
    keys = role_state(folder, COORDINATORS[0]) / "identity"
    shutil.copytree(keys, role_state(folder, name) / "identity")


class Cluster(Fleet):
    """Roles, devices and a proxy before the object store; as a context, it ends all of them.

    Args:
        folder: of images, states and logs.
        brokers: of all programs; each program begins with another one.
        services: those that can be killed, beside the programs of this class.
        ports: of the proxy and of the object store.
    """

    def __init__(
        self,
        folder: Folder,
        brokers: tuple[BrokerAddress, ...],
        *,
        services: Mapping[str, Service],
        ports: tuple[int, int],
    ) -> None:
        super().__init__(folder.logs, brokers[0])
        self.services = services
        self.devices: list[str] = []
        self._folder = folder
        self._brokers = brokers
        self._ports = ports
        self._log_starts: dict[str, int] = {}

    def run_all(self) -> None:
        """Start the proxy and two of each role."""
        self.run(PROXY, COORDINATORS[0])
        self.wait_for_log(COORDINATORS[0], CONNECTED)  # its keys are complete then
        copy_keys(self._folder, COORDINATORS[1])
        self.run(COORDINATORS[1], *RECEIVERS, *TRAINERS)

    def run(self, *names: str) -> None:
        """Start programs, again if they were killed, and wait until they can be used."""
        for name in names:
            self._log_starts[name] = len(self.log(name))
            module, *arguments = self._command(name)
            self.start(name, module, *arguments)
        self.wait_until(
            f"{names} ready", lambda: all(re.search(READY, self._new_log(name)) for name in names)
        )

    def start_devices(self, names: Iterable[str]) -> None:
        """Start devices with their images and states."""
        for name in names:
            options = ("--broker", rotated(self._brokers, len(self.devices)), "--fleet", FLEET)
            self.start_device(name, self._folder.images(name), *options, state=self._folder.state(name))
            self.devices.append(name)

    def leader(self) -> str:
        """Return the name of the coordinator that leads, empty if none does."""
        return next((name for name in COORDINATORS if self._is_in(name, CONNECTED, "standby")), "")

    def trainer_at_work(self) -> str:
        """Return the name of a trainer that has claimed a job and not ended it, empty if none has."""
        return next((name for name in TRAINERS if self._is_in(name, "job claimed", "job finished")), "")

    def building(self, devices: Iterable[str]) -> set[str]:
        """Return those of the devices that have built their submission."""
        return {name for name in devices if "submission built" in self.log(name)}

    def submissions(self) -> dict[str, str]:
        """Return the digest of each device's newest acknowledged submission."""
        acknowledged = re.compile(r"submission received by the aggregator digest=([0-9a-f]{64})")
        digests = {name: acknowledged.findall(self.log(name)) for name in self.devices}
        return {name: found[-1] for name, found in digests.items() if found}

    def with_head(self) -> set[str]:
        """Return the devices that use a head."""
        return {name for name in self.devices if "head in use" in self.log(name)}

    def accepted(self) -> Counter[str]:
        """Return how often each device's submission was accepted, by the logs of all programs."""
        return Counter(
            device for name in self.processes for device, _ in accepted_submissions(self.log(name))
        )

    def check(self) -> None:
        """Raise ProtofleetError if a program has ended by itself."""
        for name, process in self.processes.items():
            if (code := process.poll()) not in (None, -9):
                raise ProtofleetError(f"{name} ended with exit status {code}: see {self.root / name}.log")

    def _command(self, name: str) -> list[str]:
        """Return the module of a program, and its arguments."""
        if name == PROXY:
            return ["tests.support.stores.object_store", *map(str, self._ports)]
        role, number = name.split("-")
        broker = ("--broker", rotated(self._brokers, int(number) - 1))
        arguments = {
            "coordinator": ("coordinate", "--external-training", "--task", str(self._folder.task), *broker),
            "receiver": ("receive", "--name", name, *broker),
            "trainer": ("train", "--name", name, "--lease-s", "5"),
        }
        return ["aggregator.cli", *arguments[role], "--state", str(role_state(self._folder, name))]

    def _new_log(self, name: str) -> str:
        """Return what a program has logged since its last start."""
        return self.log(name)[self._log_starts[name] :]

    def _is_in(self, name: str, begin: str, end: str) -> bool:
        """Return True if a running program has logged `begin` after the last `end`."""
        log = self._new_log(name)
        return self.processes[name].poll() is None and log.rfind(begin) > log.rfind(end)
