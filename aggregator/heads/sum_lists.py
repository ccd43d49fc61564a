"""Lists of submissions whose masks a second operator opens: a submission is in one list, and is summed once.

A list is stored before it is requested, and requested again until its signed sum of masks is there. The training of
the next head opens the sum of its submissions, and adds it to the total of all earlier lists, stored with the head.
"""

import logging
import time
from collections.abc import Mapping

from msgspec import UNSET
from msgspec.structs import replace

from aggregator.intake.validation import read_message
from aggregator.storage.store import Store
from aggregator.storage.sum_lists import PendingList, SumLists, put_sums, sums_of, without_pending
from aggregator.tasks.task_preparation import Task
from protocol.errors import BlobLost, MalformedMessage, StateError
from protocol.log import event
from protocol.statistics.noisy_sums import released_values
from protocol.wire.arrays import to_array
from protocol.wire.codec import decode, encode
from protocol.wire.messages import (
    MAX_FRAME_BYTES,
    Frame,
    MaskedSubmission,
    SecondOperator,
    Submission,
    SumReply,
    SumRequest,
)
from protocol.wire.repeated_transfers import Transfers
from protocol.wire.signing import is_own_sum

log = logging.getLogger(__name__)

REPEAT_S = 60.0
"""Seconds after which a request without a reply is published again."""


def largest_list(least: Mapping[str, int], *, min_devices: int) -> tuple[str, ...]:
    """Return as many devices as possible of which each accepts their number; none if they are fewer than `min_devices`.

    `least` are the submissions that each device wants in a list: one that wants more than there are joins a later list.
    """
    chosen = dict(least)
    while chosen and max(chosen.values()) > len(chosen):
        chosen = {device: wanted for device, wanted in chosen.items() if wanted <= len(chosen)}
    return tuple(sorted(chosen)) if len(chosen) >= min_devices else ()


class SecondOperatorLists:
    """The lists of a task with a second operator."""

    def __init__(self, task: Task, store: Store, operator: SecondOperator) -> None:
        self._task, self._store, self._operator = task, store, operator
        shape = {"classes": len(task.manifest.classes), "size": task.expectation.prototype_size}
        self._values = sum(released_values(**shape).values())
        self._transfers = Transfers(max_bytes=4 * self._values + 1024)
        self._due_s = 0.0

    @property
    def stored(self) -> SumLists:
        return sums_of(self._store.facts, self._task.digest)

    def _put(self, lists: SumLists, *, change: int | None = None) -> bool:
        """Store lists, with `change` unless anything has changed since; return True if they are stored."""
        with self._store.transaction():  # `aggregator forget` changes other lists
            if change is not None and self._store.newest_change() != change:
                return False
            put_sums(self._store.facts, lists)
        return True

    @property
    def is_opened(self) -> bool:
        """True if the second operator has opened the pending list."""
        pending = self.stored.pending
        return pending is not None and bool(pending.masks)

    def is_open(self, members: Mapping[str, bytes]) -> bool:
        """Return True if the masks of a list that no head has are opened; otherwise make one of what is new.

        A list's submissions stay the same, whatever its devices do meanwhile.

        Raises:
            StateError: a submission cannot be read, or nothing can be stored.
        """
        lists, change = self.stored, self._store.newest_change()
        new = members.keys() - set(lists.devices)
        if lists.pending is not None and lists.pending.masks and not self._has(lists.pending.masks):
            lists = replace(lists, pending=replace(lists.pending, masks=""))  # it is requested again
            self._put(lists)
        if (refused := lists.pending) is not None and refused.problem and refused.members.keys() != new:
            # The second operator has not opened it, and a device was revoked or has come since.
            lists = replace(lists, pending=None)
        if lists.pending is None:
            is_enough = len(new) >= self._operator.min_devices  # otherwise each new one would read all again
            masked = {device: self._masked(device, members[device]) for device in new if is_enough}
            least = {device: each.mask.min_devices for device, each in masked.items()}
            chosen = largest_list(least, min_devices=self._operator.min_devices)
            if not chosen:
                wanted = max([self._operator.min_devices, *least.values()])  # an owner may require more
                missing = max(1, wanted - len(new))
                text = "waiting for devices that are in no sum"
                event(log, logging.INFO, text, devices=missing, wanted=wanted)
                return False
            request = SumRequest(
                task=self._task.digest,
                values=self._values,
                submissions=tuple(masked[device] for device in chosen),
            )
            pending = PendingList(
                members={device: members[device].hex() for device in chosen},
                request=self._store.blobs.put(encode(request)).hex(),
                requested_s=time.time(),
            )
            lists = replace(lists, pending=pending)
            if not self._put(lists, change=change):  # a device may have been forgotten meanwhile
                return False
            event(log, logging.INFO, "sum requested from the second operator", devices=len(chosen))
        self._due_s = 0.0
        return self.is_opened

    def abandon(self, reason: str) -> None:
        """Leave the pending list out of all heads: its devices are in no other one of this task."""
        lists = self.stored
        if lists.pending is not None:
            self._put(replace(without_pending(lists), problem=reason))
            text, number = "list left out of all heads: start a new task", len(lists.pending.members)
            event(log, logging.ERROR, text, devices=number, reason=reason)

    def _masked(self, device: str, digest: bytes) -> MaskedSubmission:
        message = read_message(self._store.blobs.read(digest))
        if not isinstance(message, Submission) or message.mask is UNSET:
            raise StateError(f"the stored submission of {device} has no mask")
        return MaskedSubmission(device=device, sequence=message.sequence, mask=message.mask)

    def connected(self) -> None:
        self._due_s = 0.0

    def request(self) -> bytes | None:
        """Return the request that is due to be published, None if there is none."""
        if time.monotonic() < self._due_s:
            return None
        self._due_s = time.monotonic() + REPEAT_S
        pending = self.stored.pending
        if pending is None or pending.masks:
            return None
        try:
            return self._store.blobs.read(bytes.fromhex(pending.request))
        except BlobLost:
            return self._made_again(pending)

    def _made_again(self, pending: PendingList) -> bytes | None:
        """Return a request that is lost, made of the same submissions; None if one of them is lost, too."""
        try:
            submissions = [
                self._masked(name, bytes.fromhex(digest)) for name, digest in pending.members.items()
            ]
        except BlobLost as error:
            self.abandon(str(error))
            return None
        request = SumRequest(task=self._task.digest, values=self._values, submissions=tuple(submissions))
        self._store.blobs.put(data := encode(request))
        return data

    def _has(self, digest: str) -> bool:
        return bytes.fromhex(digest) in self._store.blobs

    def take(self, payload: bytes) -> bool:
        """Take a frame of a reply; return True if the pending list is opened or refused by it.

        Raises:
            StateError: they cannot be stored.
        """
        try:
            complete = self._transfers.take(decode(payload, Frame, max_bytes=MAX_FRAME_BYTES))
            if complete is None:
                return False
            reply = decode(complete, SumReply, max_bytes=len(complete))
        except MalformedMessage as error:
            event(log, logging.WARNING, "reply of the second operator refused", reason=error)
            return False
        lists = self.stored
        pending = lists.pending
        if pending is None or pending.masks or reply.request.hex() != pending.request:
            return False
        if not is_own_sum(reply, public=self._operator.sign_key, fleet=self._task.file.fleet):
            text = "reply of the second operator refused"
            event(log, logging.WARNING, text, reason="its signature is invalid")
            return False
        if problem := reply.problem or self._problem_of(reply):
            self._put(replace(lists, pending=replace(pending, problem=problem)))
            return True
        masks = self._store.blobs.put(complete).hex()
        self._put(replace(lists, pending=replace(pending, masks=masks, problem="")))
        event(log, logging.INFO, "sum opened by the second operator", devices=len(pending.members))
        return True

    def _problem_of(self, reply: SumReply) -> str:
        if reply.masks is UNSET or reply.masks.dtype != "u4" or reply.masks.shape != (self._values,):
            return "its sum has another shape"
        try:
            to_array(reply.masks)
        except MalformedMessage as error:
            return str(error)
        return ""
