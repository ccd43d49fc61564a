"""The programs of a fleet past one machine, all on this one: services and roles."""

import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from examples.cluster.processes import Processes, Program
from examples.cluster.services import BUCKET, Brokers, make_bucket, object_store
from examples.quickstart.folder import FLEET, Folder

LEASE_S = 5.0
"""After which the job of a killed trainer is another one's."""


class Cluster:
    """A fleet with two of each role.

    Args:
        folder: of images, states and logs.
        processes: what starts its programs.
        brokers: of all programs.
        database: the program of PostgreSQL.
        store: URL of the database.
        on_poll: called several times a second while it waits.
    """

    def __init__(
        self,
        folder: Folder,
        processes: Processes,
        brokers: Brokers,
        database: Program,
        store: str,
        *,
        on_poll: Callable[[], None],
    ) -> None:
        self.processes = processes
        self.brokers = brokers
        self._folder = folder
        self._database = database
        self._environment = {
            "PROTOFLEET_STORE": store,
            "PROTOFLEET_BLOBS": f"s3://{BUCKET}/cluster",
            "PROTOFLEET_FLEET": FLEET,
            "PROTOFLEET_HTTP": "off",
            "OMP_NUM_THREADS": "1",
        }
        self._on_poll = on_poll

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition.

        Raises:
            ProtofleetError: a program has ended by itself, or the time is over.
        """
        self.processes.wait_until(holds, self._on_poll)

    def start(self, *programs: Program) -> None:
        """Start programs, and wait until they can be used."""
        for program in programs:
            self.processes.start(program)
        self.wait_until(lambda: all(self.processes.states[each.name] == "running" for each in programs))

    def start_services(self) -> None:
        """Start PostgreSQL, S3 and the brokers."""
        server, proxy, port = object_store()
        self.start(self._database, server, proxy, *self.brokers.programs)
        make_bucket(port)

    def start_roles(self) -> None:
        """Start two of each role."""
        self.start(self._coordinator(1))
        self._share_keys()
        others = (self._coordinator(2), *map(self._receiver, (1, 2)), *map(self._trainer, (1, 2)))
        self.start(*others)

    def state(self, name: str) -> Path:
        """Return the state folder of a role."""
        return self._folder.root / "roles" / name

    def leader(self) -> str:
        """Return the name of the coordinator that leads; the first one if none does."""
        names = [name for name, program in self.processes.programs.items() if program.role == "coordinator"]
        return next((name for name in names if self.is_leading(name)), names[0])

    def has_leader(self) -> bool:
        """Return True if a coordinator leads."""
        return self.is_leading(self.leader())

    def is_leading(self, name: str) -> bool:
        """Return True if a coordinator runs and leads."""
        return self.processes.states[name] == "running" and self.processes.log(name).rfind(
            "connected to the broker"
        ) > self.processes.log(name).rfind("standby")

    def shards(self, name: str) -> str:
        """Return how many of the 64 shards of uploads a receiver has."""
        return next(reversed(re.findall(r" shards=(\d+)", self.processes.log(name))), "no")

    def trainer_at_work(self) -> str | None:
        """Return the name of a trainer that has claimed a job and not ended it."""
        for name, program in self.processes.programs.items():
            log = self.processes.log(name)
            if program.role == "trainer" and log.rfind("job claimed") > log.rfind("job finished"):
                return name if self.processes.states[name] == "running" else None
        return None

    def accepted(self) -> Counter[str]:
        """Return how often each device's submission was accepted, by the logs of all roles."""
        logs = "".join(self.processes.log(name, whole=True) for name in self.processes.programs)
        return Counter(re.findall(r"submission accepted device=(\S+)", logs))

    def _share_keys(self) -> None:
        """Give the second coordinator the first one's keys, which an operator copies or mounts."""
        first, second = (self.state(f"coordinator-{number}") for number in (1, 2))
        second.mkdir(mode=0o700)
        shutil.copytree(first / "identity", second / "identity", ignore=shutil.ignore_patterns("lock"))

    def _coordinator(self, number: int) -> Program:
        return self._role(
            *("coordinator", number, "coordinate", "--external-training", "--task", self._folder.task),
            *("--broker", self.brokers.rotated(number - 1)),
            ready="connected to the broker|standby",
        )

    def _receiver(self, number: int) -> Program:
        broker = self.brokers.rotated(number - 1)
        return self._role(
            "receiver",
            number,
            "receive",
            "--broker",
            broker,
            "--name",
            number,
            ready="connected to the broker",
        )

    def _trainer(self, number: int) -> Program:
        lease = ("--name", f"trainer-{number}", "--lease-s", LEASE_S)
        return self._role("trainer", number, "train", *lease, ready="worker ready")

    def _role(self, role: str, number: int, *arguments: object, ready: str) -> Program:
        name = f"{role}-{number}"
        return Program(
            name=name,
            role=role,
            command=(
                sys.executable,
                "-m",
                "aggregator.cli",
                *map(str, arguments),
                "--state",
                str(self.state(name)),
            ),
            environment=self._environment,
            ready=ready,
        )
