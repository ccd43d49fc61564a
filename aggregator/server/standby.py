"""Programs that wait: for PostgreSQL or the object store to answer, and while another aggregator leads the fleet."""

import contextlib
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from aggregator.intake import intake_status
from aggregator.security.key_rotation import require_fleet_key
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import ServedTask
from protocol.errors import NoAnswer, NotLeader, StateError
from protocol.log import event
from protocol.mqtt.reconnect_delay import Backoff
from protocol.service_manager import ServiceManager

log = logging.getLogger(__name__)

CHECK_S = 60.0
"""Seconds between two checks of a standby's signing key."""

PAUSE_S = 1.0
"""Seconds between two attempts to lead while PostgreSQL or the object store fails."""

Result = TypeVar("Result")


def until_answered(start: Callable[[], Result]) -> Result:
    """Return what `start` does, which is repeated as long as PostgreSQL or the object store does not answer."""
    backoff, manager = Backoff(1, random.uniform), ServiceManager()
    while True:
        try:
            return start()
        except NoAnswer as error:
            delay_s = backoff.pause_s(connected_s=0.0, messages=0)
            text = "cannot start: retrying"
            event(log, logging.WARNING, text, reason=error, retry=f"in {delay_s:.1f} s")
            manager.ready()  # a service manager would otherwise end it
            manager.alive()
            time.sleep(delay_s)


class Standby:
    """The wait of a program while another one leads.

    Args:
        state: the program's state directory.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self._manager = ServiceManager()
        self._is_known = False
        """Another aggregator has led while this program ran."""
        self._is_announced = False
        """That this one leads is logged."""
        self._leader: str | None = None
        self._problem = ""
        self._check_s = 0.0

    def wait(self, leader: str) -> None:
        """Log once that another aggregator leads, and check that this one could take over.

        Raises:
            ConfigError: the state directory has another signing key than the fleet, or lacks its blobs.
        """
        self._is_known, self._is_announced, self._problem = True, False, ""
        if leader != self._leader:
            self._leader = leader
            intake_status.create(self._state)  # that of an earlier lead is over
            event(log, logging.INFO, "standby: another aggregator leads the fleet", leader=leader)
            self._manager.ready()
        self._manager.alive()
        if (now_s := time.monotonic()) >= self._check_s:
            with (
                contextlib.suppress(StateError),
                contextlib.closing(open_store(self._state, read_only=True)) as store,
            ):
                require_fleet_key(store)
                if store.facts.get(ServedTask) is not None:
                    store.require_blobs()
                self._check_s = now_s + CHECK_S

    def open(self, open_to_lead: Callable[[], Store]) -> Store:
        """Return the store once this program leads; if it has been a standby, it outlives failures of PostgreSQL.

        Raises:
            StateError: the store cannot be used at the program's start.
            ConfigError: as `wait` does.
        """
        while True:
            try:
                store = open_to_lead()
            except StateError as error:
                if not self._is_known:
                    raise
                self._pause("standby: cannot find out which aggregator leads", error)
            else:
                if self._is_known and not self._is_announced:
                    self._is_announced = True
                    event(log, logging.INFO, "this aggregator leads the fleet now")
                return store

    def repeat(self, lead: Callable[[], Result]) -> Result:
        """Return what `lead` does, which is called again each time that another aggregator takes the lead from it.

        If it has been a standby, it outlives a database or object store that fails while it takes over.
        """
        while True:
            try:
                return lead()
            except NotLeader as error:
                self._is_known, self._is_announced, self._leader = True, False, None
                event(log, logging.WARNING, "this aggregator no longer leads", reason=error)
            except StateError as error:
                if not self._is_known:
                    raise
                self._leader = None
                self._pause("standby: cannot lead", error)

    def _pause(self, text: str, error: StateError) -> None:
        """Log a problem once, and wait before the next attempt."""
        if (problem := str(error)) != self._problem:
            self._problem = problem
            event(log, logging.WARNING, text, reason=problem)
        self._manager.alive()
        time.sleep(PAUSE_S)
