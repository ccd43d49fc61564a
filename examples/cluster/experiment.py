"""The order of events: a cluster whose programs are killed, and one process with the same submissions."""

import time
from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

from examples.cluster.cluster import Cluster
from examples.cluster.devices import Devices
from examples.cluster.faults import Faults
from examples.cluster.processes import Processes
from examples.cluster.report import Fault, Result, progress
from examples.cluster.services import mosquitto, nats, postgresql
from examples.cluster.single import Trained, run_single, trained_head
from examples.quickstart.folder import Folder

BROKERS = {"nats": nats, "mosquitto": mosquitto}
UPLOAD_FAULTS = ("broker", "receiver", "coordinator", "database", "object-store")
"""Roles of which a program is killed while devices upload, in this order."""
TRAINER = "trainer"
ROLES = ("receiver", "coordinator", "trainer")
REFRESH_S = 0.25


@dataclass(frozen=True)
class Plan:
    """Settings of a run.

    Attributes:
        names: of the devices.
        broker: which brokers.
        faults: names of what is killed.
        pause: pause the leading coordinator instead.
        deadline_s: time of the monotonic clock at which it fails.
    """

    names: tuple[str, ...]
    broker: str
    faults: tuple[str, ...]
    pause: bool
    deadline_s: float


def run(plan: Plan, folder: Folder, console: Console) -> Result:
    """Run the cluster and then the single process, and compare their heads.

    Raises:
        ProtofleetError: a program failed or took too long.
    """
    started_s = time.monotonic()
    outcome = _run_cluster(plan, folder, console)
    with console.status("a single process trains on the same submissions"):
        keys = folder.root / "roles" / "coordinator-1" / "identity"
        single = run_single(folder, plan.names, keys, deadline_s=plan.deadline_s)
    return compare(plan, outcome, single, seconds=time.monotonic() - started_s)


@dataclass(frozen=True)
class Outcome:
    """The end of a run of the cluster."""

    trained: Trained
    faults: list[Fault]
    submitted: dict[str, str]
    """The digest of each device's submission that was acknowledged."""
    accepted: Counter[str]
    """How often each device's submission was accepted."""


def compare(plan: Plan, outcome: Outcome, single: Trained, *, seconds: float) -> Result:
    """Compare the head of the cluster with that of a single process, and find submissions that do not count once."""
    trained = outcome.trained
    lost = [name for name in plan.names if trained.submissions.get(name) != outcome.submitted[name]]
    twice = sorted(name for name, times in outcome.accepted.items() if times > 1)
    return Result(
        is_same=trained == single and not lost and not twice,
        head=trained.digest,
        single_head=single.digest,
        devices=len(plan.names),
        submissions=len(trained.submissions),
        lost=tuple(lost),
        counted_twice=tuple(twice),
        broker=plan.broker,
        faults=tuple(outcome.faults),
        seconds=round(seconds, 1),
    )


def _run_cluster(plan: Plan, folder: Folder, console: Console) -> Outcome:
    with (
        postgresql() as (database, store),
        Processes(folder.logs, deadline_s=plan.deadline_s) as processes,
        Live(console=console, transient=True, refresh_per_second=4) as live,
    ):
        display = _Display(live, processes, devices=len(plan.names))
        brokers = BROKERS[plan.broker](folder.root / "services")
        cluster = Cluster(folder, processes, brokers, database, store, on_poll=display.update)
        display.event("starting PostgreSQL, S3 and the brokers")
        cluster.start_services()
        display.event("starting two of each role")
        cluster.start_roles()
        display.cluster, display.fleet = cluster, Devices(folder, folder.logs / "devices", processes)
        faults = Faults(cluster, display.fleet, display.event)
        _harm_all(plan, faults)
        submitted = display.fleet.submissions()
        outcome = Outcome(
            trained_head(cluster.state(cluster.leader())), faults.found, submitted, cluster.accepted()
        )
        display.event(f"head {outcome.trained.digest[:16]} on all {len(plan.names)} devices")
        processes.stop(
            "devices", *(name for name, program in processes.programs.items() if program.role in ROLES)
        )
    return outcome


def _harm_all(plan: Plan, faults: Faults) -> None:
    """Start the devices in groups, and harm a program while each group uploads; the last group completes the quorum."""
    during_uploads = [each for each in UPLOAD_FAULTS if each in plan.faults]
    groups = [
        list(plan.names[number :: len(during_uploads) + 1]) for number in range(len(during_uploads) + 1)
    ]
    for each, group in zip(during_uploads, groups, strict=False):
        faults.during_uploads(each, group, pause=plan.pause and each == "coordinator")
    faults.start(groups[-1])
    if TRAINER in plan.faults:
        faults.during_training()
    faults.wait_for_heads()


class _Display:
    """The state of all programs in a terminal, and a line for each event."""

    def __init__(self, live: Live, processes: Processes, *, devices: int) -> None:
        self.cluster: Cluster | None = None
        self.fleet: Devices | None = None
        self._live = live
        self._processes = processes
        self._devices = devices
        self._started_s = time.monotonic()
        self._next_s = 0.0

    def event(self, text: str) -> None:
        """Print an event with its time."""
        passed_s = time.monotonic() - self._started_s
        self._live.console.print(f"[dim]{passed_s:6.1f} s[/]  {text}", highlight=False, soft_wrap=True)

    def update(self) -> None:
        """Show the state of all programs, at most four times a second."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + REFRESH_S
        programs: dict[str, dict[str, str]] = {}
        for name, program in self._processes.programs.items():
            if program.role:
                programs.setdefault(program.role, {})[name] = self._state(name)
        fleet = self.fleet
        self._live.update(
            progress(
                programs,
                devices=self._devices,
                started=len(fleet.started) if fleet else 0,
                submitted=len(fleet.submissions()) if fleet else 0,
                with_head=len(fleet.with_head()) if fleet else 0,
            )
        )

    def _state(self, name: str) -> str:
        state: str = self._processes.states[name]
        if self.cluster is None or state != "running":
            return state
        if name == self.cluster.trainer_at_work():
            return "training"
        role = self._processes.programs[name].role
        if role == "receiver":
            return f"{self.cluster.shards(name)} shards"
        if role == "coordinator":
            return "leading" if self.cluster.is_leading(name) else "standby"
        return state
