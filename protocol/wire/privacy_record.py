"""Records of a device's releases under differential privacy: neither side's record may ever have fewer. Pure."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from protocol.wire.messages import Released

Kinds = Counter[Released]
"""Number of releases by kind, each of which is a `Released` with `times` 1."""


def kinds_of(record: Iterable[Released]) -> Kinds:
    """Return the number of releases of each kind in a record."""
    kinds = Kinds()
    for each in record:
        kinds[msgspec.structs.replace(each, times=1)] += each.times
    return kinds


def record_of(kinds: Kinds) -> tuple[Released, ...]:
    """Return a record with so many releases of each kind, in an order that depends on nothing else."""
    record = (msgspec.structs.replace(kind, times=times) for kind, times in kinds.items() if times > 0)
    return tuple(sorted(record, key=msgspec.structs.astuple))
