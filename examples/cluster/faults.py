"""Faults of the example: programs are killed while devices upload, and during the training."""

import time
from collections.abc import Callable, Collection, Sequence

from examples.cluster.cluster import Cluster
from examples.cluster.devices import Devices
from examples.cluster.report import Fault
from protocol.errors import ProtofleetError

RESTART_S = 3.0
"""Seconds after which a killed program is started again, as by a service manager."""


class Faults:
    """Kills programs of a cluster, one at a time, and measures when the fleet goes on.

    Args:
        cluster: where the programs are.
        devices: what uploads.
        on_event: called with a line about each event.
    """

    def __init__(self, cluster: Cluster, devices: Devices, on_event: Callable[[str], None]) -> None:
        self.found: list[Fault] = []
        self._cluster = cluster
        self._devices = devices
        self._on_event = on_event
        self._started_s = time.monotonic()

    def start(self, names: Sequence[str]) -> None:
        """Start devices."""
        self._devices.start(names, self._cluster.brokers.addresses)

    def wait_for_heads(self) -> None:
        """Wait until all devices use the head."""
        self._cluster.wait_until(lambda: self._devices.with_head().issuperset(self._devices.started))

    def during_uploads(self, role: str, names: Sequence[str], *, pause: bool = False) -> None:
        """Start devices, and harm a program as soon as one of them has a submission; then wait for all of them."""
        cluster, devices = self._cluster, self._devices
        devices.start(names, cluster.brokers.addresses)
        cluster.wait_until(lambda: not devices.building().isdisjoint(names))
        self._harm(self._target(role), devices.submissions, names, pause=pause)

    def _target(self, role: str) -> str:
        """Return the program of a role that most others depend on."""
        if role == "coordinator":
            return self._cluster.leader()
        programs = self._cluster.processes.programs.values()
        return next(program.name for program in programs if program.role == role)

    def during_training(self) -> None:
        """Kill the trainer that has claimed the job, and wait until all devices use the head.

        Raises:
            ProtofleetError: the training was over too soon.
        """
        names: list[str] = []

        def is_at_work() -> bool:
            names.extend(filter(None, [self._cluster.trainer_at_work()]))
            return bool(names or self._devices.with_head())

        self._cluster.wait_until(is_at_work)
        if not names:
            raise ProtofleetError("the training was over before its trainer could be killed: run it again")
        self._harm(names[0], self._devices.with_head, self._devices.started)

    def _harm(
        self, name: str, done: Callable[[], Collection[str]], names: Sequence[str], *, pause: bool = False
    ) -> None:
        processes = self._cluster.processes
        at_s, before = time.monotonic(), set(done())
        (processes.pause if pause else processes.kill)(name)
        action = "paused" if pause else "killed"
        self._on_event(f"{name} {action}")
        next_s = all_s = leads_s = 0.0

        def is_over() -> bool:
            nonlocal next_s, all_s, leads_s
            passed_s, now = time.monotonic() - at_s, set(done())
            next_s = next_s or (passed_s if now > before else 0.0)
            all_s = all_s or (passed_s if now.issuperset(names) else 0.0)
            leads_s = leads_s or (passed_s if self._cluster.has_leader() else 0.0)
            if processes.states[name] == "killed" and passed_s > RESTART_S:
                processes.restart(name)
            elif processes.states[name] == "paused" and leads_s:
                processes.resume(name)
            return bool(all_s and leads_s) and processes.states[name] == "running"

        self._cluster.wait_until(is_over)
        waiting = len(set(names) - before)
        self.found.append(
            Fault(
                program=name,
                action=action,
                at_s=round(at_s - self._started_s, 2),
                waiting=waiting,
                next_s=round(next_s, 2),
                all_s=round(all_s, 2),
                leads_s=round(leads_s, 2) if processes.programs[name].role == "coordinator" else None,
            )
        )
        self._on_event(
            f"{name} runs again; the next answer came after {next_s:.1f} s, all {waiting} within {all_s:.1f} s"
        )
