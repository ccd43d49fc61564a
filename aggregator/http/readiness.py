"""The readiness of the fleet, for load balancers and service managers."""

import msgspec

from aggregator.http.snapshots import Snapshot


class Readiness(msgspec.Struct, frozen=True):
    """The readiness for uploads of devices, and what is wrong without it."""

    ready: bool
    problems: tuple[str, ...] = ()


def readiness(snapshot: Snapshot) -> Readiness:
    """Return the readiness: an aggregator runs on the state and stores uploads."""
    status = snapshot.status
    if status is None:
        return Readiness(ready=False, problems=(snapshot.problem,))
    problems = []
    if not status.running:
        problems.append("the aggregator is not running: start `aggregator run`")
    if status.intake.stopped_s is not None:
        problems.append(f"uploads cannot be stored: {status.intake.reason}")
    return Readiness(ready=not problems, problems=tuple(problems))
