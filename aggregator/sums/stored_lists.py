"""Lists of submissions whose sums a second operator opens, by task: a task that returns continues where it was.

The last functions are what other rooms ask: retention, `forget`, and what makes and stores a head.
"""

from typing import Any

import msgspec
from msgspec.structs import replace

from protocol.storage.facts import Facts


class PendingList(msgspec.Struct, frozen=True):
    """A list of submissions that no head is made of yet; see `aggregator.sums.second_operator`."""

    members: dict[str, str]
    """Device to the hex digest of its submission."""
    request: str
    """Hex digest of the request to the second operator, a blob."""
    requested_s: float
    """Unix seconds."""
    masks: str = ""
    """Hex digest of the second operator's reply, a blob; empty without one."""
    problem: str = ""
    """Why the second operator has opened no sum."""


class SumLists(msgspec.Struct, frozen=True):
    """The lists of a task, and the sum of all that are opened."""

    task: bytes
    count: int = 0
    """Lists whose sums are in `total`."""
    devices: tuple[str, ...] = ()
    """Devices of all opened lists, also of those that could not be used."""
    summed: int = 0
    """Devices whose sums are in `total`."""
    pending: PendingList | None = None
    total: str = ""
    """Hex digest of the sum of all lists, a blob (`Tensors`); empty without one."""
    signed: tuple[str, ...] = ()
    """Hex digests of the request and the reply of each earlier list, blobs: what the second operator has signed."""
    problem: str = ""
    """Why the newest list that was left out of all heads could not be used."""


class SumsOfTasks(msgspec.Struct, frozen=True):
    """The lists of every task, by its digest in hex."""

    tasks: dict[str, SumLists] = {}


def sums_of_tasks(facts: Facts) -> dict[str, SumLists]:
    return (facts.get(SumsOfTasks) or SumsOfTasks()).tasks


def sums_of(facts: Facts, task: bytes) -> SumLists:
    return sums_of_tasks(facts).get(task.hex()) or SumLists(task)


def put_sums(facts: Facts, lists: SumLists) -> None:
    facts.put(SumsOfTasks({**sums_of_tasks(facts), lists.task.hex(): lists}))


def without_pending(lists: SumLists) -> SumLists:
    """Return the lists without the pending one, whose devices are in no other one of the task."""
    if (pending := lists.pending) is None:
        return lists
    signed = (*lists.signed, pending.request, pending.masks)
    return replace(lists, devices=(*lists.devices, *pending.members), signed=signed, pending=None)


def devices_of(lists: SumLists) -> set[str]:
    """Return the devices whose submissions are in a sum, or are going to be."""
    return {*lists.devices, *(lists.pending.members if lists.pending else ())}


def opened_tasks(facts: Facts, device: str) -> set[bytes]:
    """Return the tasks with an opened sum that a device is in."""
    return {lists.task for lists in sums_of_tasks(facts).values() if device in lists.devices}


def drop_requests(facts: Facts, *, task: bytes | None = None, device: str | None = None) -> None:
    """Drop the pending lists of a task, or those with a device: they are made again of what is left."""
    for lists in sums_of_tasks(facts).values():
        pending = lists.pending
        if pending is not None and (lists.task == task or device in pending.members):
            put_sums(facts, replace(lists, pending=None))


def blobs_of_sums(facts: Facts) -> set[bytes]:
    """Return the digests of the blobs that the lists of all tasks need."""
    names = set[str]()
    for lists in sums_of_tasks(facts).values():
        names |= {lists.total, *lists.signed}
        if (pending := lists.pending) is not None:
            names |= {pending.request, pending.masks, *pending.members.values()}
    return {bytes.fromhex(name) for name in names if name}


def job_fields(facts: Facts, task: bytes) -> dict[str, Any]:
    """Return the fields of a `NoisySumsJob` on the pending list and the total of the others; none without a list."""
    lists = sums_of(facts, task)
    if (pending := lists.pending) is None:
        return {}
    masked = {"members": pending.members, "masks": pending.masks}
    return {**masked, "total": lists.total, "devices": lists.summed}


def add_to_total(facts: Facts, task: bytes, total: bytes) -> None:
    """Store that a head is made of a total, a blob, to which the pending list now belongs."""
    lists = sums_of(facts, task)
    summed = lists.summed + (len(lists.pending.members) if lists.pending else 0)
    after = replace(without_pending(lists), count=lists.count + 1, summed=summed, total=total.hex())
    put_sums(facts, after)
