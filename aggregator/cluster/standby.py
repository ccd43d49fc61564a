"""The wait of an aggregator while another one leads the fleet."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from aggregator.storage import stop_reason
from protocol.log import event
from protocol.service_manager import ServiceManager

log = logging.getLogger(__name__)

CHECK_S = 60.0
"""Seconds between two checks that the standby could take over."""


class Standby:
    """The wait of a program with a state directory; `check` raises ConfigError if it could not take over.

    `check` returns False if that cannot be found out now.
    """

    def __init__(self, state: Path, check: Callable[[], bool]) -> None:
        self._state = state
        self._check = check
        self._manager = ServiceManager()
        self._leader: str | None = None
        self._check_s = 0.0

    def wait(self, leader: str) -> None:
        """Log once that another aggregator leads; raises ConfigError as `check` does."""
        if leader != self._leader:
            self._leader = leader
            stop_reason.create(self._state)  # that of an earlier lead is over
            event(log, logging.INFO, "standby: another aggregator leads the fleet", leader=leader)
            self._manager.ready()
        self._manager.alive()
        if (now_s := time.monotonic()) >= self._check_s and self._check():
            self._check_s = now_s + CHECK_S
