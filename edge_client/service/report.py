"""The problems, the warning and the refused messages that a device reports."""

import logging
from collections import Counter

from edge_client.agent.manifest_trust import UntrustedManifest
from edge_client.agent.state import Mode
from edge_client.config import Settings
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import PROBLEMS, BuildProblem, HeadProblem, Problem
from protocol.errors import BadSignature, MalformedMessage
from protocol.log import event

log = logging.getLogger(__name__)


class Report:
    """The part of the device's info that is not stored, and the problems that `edge-client status` shows as well."""

    def __init__(self, settings: Settings, store: DeviceState) -> None:
        self.is_due = False
        """The info has changed since it was published."""
        self.warning = ""
        """The warning for the operator; empty if no other program has used this device's key."""
        self.refused: Counter[str] = Counter()
        """Refused messages by reason."""
        self._store = None if settings.mode is Mode.DRY_RUN else store
        # A build's problem stays until the next build, and a head's until the next head.
        reset = [kind() for kind in PROBLEMS if kind not in {BuildProblem, HeadProblem}]
        self._problems = {type(problem): problem for problem in reset}
        if self._store is not None:
            self._store.set(*reset)

    def problem(self, *kinds: type[Problem]) -> str:
        """Return the first problem of some kinds that the device has had since the start; empty if it has none."""
        texts = (self._problems.get(kind, Problem()).text for kind in kinds)
        return next(filter(None, texts), "")

    def set(self, problem: Problem) -> bool:
        """Store and report a problem, or with an empty text its end; return whether the device has a new one."""
        if problem == self._problems.get(type(problem)):
            return False
        self._problems[type(problem)] = problem
        if self._store is not None:
            self._store.set(problem)
        self.is_due = True
        return bool(problem.text)

    def refuse(self, topic: str, error: UntrustedManifest | BadSignature | MalformedMessage) -> None:
        """Count a refused message, and log the first one for each reason.

        It is reported when the number for one reason reaches a power of two.
        """
        reason = "signature" if isinstance(error, BadSignature) else "malformed"
        if isinstance(error, UntrustedManifest):
            reason = error.reason
        self.refused[reason] += 1
        count = self.refused[reason]
        level = logging.WARNING if count == 1 else logging.DEBUG
        event(log, level, "message refused", topic=topic, reason=reason, error=error)
        self.is_due |= count & (count - 1) == 0
