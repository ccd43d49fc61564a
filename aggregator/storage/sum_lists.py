"""Lists of submissions whose sums a second operator opens, by task: a task that returns continues where it was."""

import msgspec
from msgspec.structs import replace

from protocol.storage.facts import Facts


class PendingList(msgspec.Struct, frozen=True):
    """A list of submissions that no head is made of yet; see `aggregator.heads.sum_lists`."""

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


def with_total(lists: SumLists, total: bytes) -> SumLists:
    """Return the lists once a head is made of the total of all, a blob."""
    summed = lists.summed + (len(lists.pending.members) if lists.pending else 0)
    return replace(without_pending(lists), count=lists.count + 1, summed=summed, total=total.hex())


def without_pending(lists: SumLists) -> SumLists:
    """Return the lists without the pending one, whose devices are in no other one of the task."""
    if (pending := lists.pending) is None:
        return lists
    signed = (*lists.signed, pending.request, pending.masks)
    return replace(lists, devices=(*lists.devices, *pending.members), signed=signed, pending=None)


def blobs_of_lists(lists: SumLists) -> set[bytes]:
    """Return the digests of the blobs that lists need."""
    pending = lists.pending
    of_pending = [pending.request, pending.masks, *pending.members.values()] if pending else []
    return {bytes.fromhex(name) for name in (lists.total, *lists.signed, *of_pending) if name}


def devices_of(lists: SumLists) -> set[str]:
    """Return the devices whose submissions are in a sum, or are going to be."""
    return {*lists.devices, *(lists.pending.members if lists.pending else ())}


class SumsOfTasks(msgspec.Struct, frozen=True):
    """The lists of every task, by its digest in hex."""

    tasks: dict[str, SumLists] = {}


def sums_of_tasks(facts: Facts) -> dict[str, SumLists]:
    return (facts.get(SumsOfTasks) or SumsOfTasks()).tasks


def sums_of(facts: Facts, task: bytes) -> SumLists:
    return sums_of_tasks(facts).get(task.hex()) or SumLists(task)


def put_sums(facts: Facts, lists: SumLists) -> None:
    facts.put(SumsOfTasks({**sums_of_tasks(facts), lists.task.hex(): lists}))
