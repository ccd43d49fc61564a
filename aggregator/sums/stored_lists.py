"""Lists of submissions whose sums a second operator opens, by task: a task that returns continues where it was.

The last functions are what other rooms ask: retention, `forget`, and what makes and stores a head.
"""

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from aggregator.storage.store import Store
from protocol.storage.blobstore import state_errors, write_atomically
from protocol.storage.facts import Facts

TOTALS = "totals"
"""Folder in the state directory with a copy of each task's total, beside the one among the blobs."""


class PendingList(msgspec.Struct, frozen=True):
    """A list of submissions that no head is made of yet; see `aggregator.sums.second_operator`."""

    members: dict[str, str]
    """Device to the hex digest of its submission."""
    request: str
    """Hex digest of the request to the second operator, a blob."""
    requested_s: float
    """Unix seconds."""
    masked: str
    """Hex digest of the sum of the masked values, a blob (`Tensors`)."""
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
    seal_key: str = ""
    """The second operator's public key for this task, in hex; empty before the first list."""


class SumsOfTasks(msgspec.Struct, frozen=True):
    """The lists of every task, by its digest in hex."""

    tasks: dict[str, SumLists] = {}


def sums_of_tasks(facts: Facts) -> dict[str, SumLists]:
    return (facts.get(SumsOfTasks) or SumsOfTasks()).tasks


def sums_of(facts: Facts, task: bytes) -> SumLists:
    return sums_of_tasks(facts).get(task.hex()) or SumLists(task)


def put_sums(facts: Facts, lists: SumLists) -> None:
    facts.put(SumsOfTasks({**sums_of_tasks(facts), lists.task.hex(): lists}))


def end_pending(store: Store, lists: SumLists) -> SumLists:
    """Return the lists without the pending one, whose devices are in no other one of the task.

    Nothing needs the payloads of their submissions any more. In a transaction of the caller.
    """
    if (pending := lists.pending) is None:
        return lists
    store.submissions.discard_payloads(lists.task, pending.members)
    signed = (*lists.signed, pending.request, pending.masks)
    return replace(lists, devices=(*lists.devices, *pending.members), signed=signed, pending=None)


def has_list_of_another(facts: Facts, task: bytes, seal_key: bytes) -> bool:
    """Return whether a list of another task was made for a second operator's seal key."""
    key = seal_key.hex()
    return any(each.seal_key == key and each.task != task for each in sums_of_tasks(facts).values())


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
            names |= {pending.request, pending.masked, pending.masks, *pending.members.values()}
    return {bytes.fromhex(name) for name in names if name}


def job_fields(facts: Facts, task: bytes) -> dict[str, Any]:
    """Return the fields of a `NoisySumsJob` on the pending list and the total of the others; none without a list."""
    lists = sums_of(facts, task)
    if (pending := lists.pending) is None:
        return {}
    added = {"masked": pending.masked, "masks": pending.masks, "listed": len(pending.members)}
    return {"members": {}, **added, "total": lists.total, "devices": lists.summed}


def add_to_total(store: Store, task: bytes, total: bytes) -> None:
    """Store that a head is made of a total, a blob, to which the pending list now belongs."""
    lists = sums_of(store.facts, task)
    summed = lists.summed + (len(lists.pending.members) if lists.pending else 0)
    after = replace(end_pending(store, lists), count=lists.count + 1, summed=summed, total=total.hex())
    put_sums(store.facts, after)


def copy_total(store: Store, file: Path, digest: bytes) -> None:
    """Copy a total, before it is stored: it cannot be made again, and a start restores it from the copy.

    Raises StateError if it cannot be written.
    """
    with state_errors(file):
        data = file.read_bytes()
        (folder := store.folder / TOTALS).mkdir(exist_ok=True)
    write_atomically(folder / digest.hex(), data)


def payloads_of_pending(facts: Facts, task: bytes) -> list[bytes]:
    """Return the digests of the submissions in the pending list of a task."""
    pending = sums_of(facts, task).pending
    return [] if pending is None else [bytes.fromhex(digest) for digest in pending.members.values()]


def delete_added(store: Store, payloads: list[bytes]) -> None:
    """Delete the submissions of a list that was added, and copies of totals before it; raises StateError."""
    store.blobs.delete(payloads)
    needed = {lists.total for lists in sums_of_tasks(store.facts).values()}
    for file in (store.folder / TOTALS).glob("*"):
        if file.name not in needed:
            with state_errors(file):
                file.unlink()
