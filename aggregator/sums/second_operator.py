"""Lists of submissions whose masks a second operator opens: a submission is in one list, and is summed once.

A list is stored before it is requested, and requested again until its signed sum of masks is there. The training of
the next head opens the sum of its submissions, and adds it to the total of all earlier lists, stored with the head.
"""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace
from numpy.typing import NDArray

from aggregator.intake.masked_values import number_of_values, opened_values
from aggregator.intake.validation import Expectation, Refused, read_message
from aggregator.security.seal_key import own_seal_key
from aggregator.storage.heads import HeadRecord
from aggregator.storage.store import Store
from aggregator.sums.stored_lists import (
    PendingList,
    SumLists,
    devices_of,
    end_pending,
    payloads_of_pending,
    put_sums,
    sums_of,
)
from protocol.errors import BlobLost, MalformedMessage, StateError
from protocol.log import event
from protocol.threads import start_thread
from protocol.wire.arrays import to_array, to_tensor
from protocol.wire.codec import decode, encode
from protocol.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_SUMMED_VALUES,
    Frame,
    MaskedSubmission,
    SecondOperator,
    Submission,
    SumReply,
    SumRequest,
    Tensors,
)
from protocol.wire.repeated_transfers import Transfers
from protocol.wire.signing import is_own_sum
from protocol.wire.topics import fleet_topic

log = logging.getLogger(__name__)

REPEAT_S = 60.0
"""Seconds after which a request without a reply is published again."""


class Sums:
    """The sums of a task without a second operator: a planned head waits for none."""

    topics: tuple[str, ...] = ()
    """The MQTT topics of replies."""

    @property
    def is_requested(self) -> bool:
        """True while the next head's submissions stay the same, whatever their devices do meanwhile."""
        return False

    def members(self, counting: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return which of the submissions that count the next head is planned of; none if there can be no head yet."""
        return counting

    def with_payloads(self, counting: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return which of the submissions that count are stored, or should be; the others' sums are in the total."""
        return counting

    def ready(self, plan: HeadRecord) -> bool:
        """Return True if a planned head can be trained; False while it waits, or if it was deleted.

        Raises:
            BlobLost: a submission is lost.
            StateError: a submission cannot be read, or nothing can be stored.
        """
        del plan
        return True

    def abandon(self, reason: str) -> None:
        """Leave the list that a head was planned of out of all heads."""

    def connected(self) -> None:
        """Publish an open request again."""

    def request(self) -> bytes | None:
        """Return the request that is due to be published, None if there is none."""
        return None

    def take(self, payload: bytes) -> str:
        """Store what arrives on one of `topics`; return why the planned head has failed by it, or an empty text.

        Raises:
            StateError: it cannot be stored.
        """
        del payload
        return ""


def sums_for(expectation: Expectation, store: Store, *, fleet: str) -> Sums:
    """Return what the heads of a task wait for."""
    operator = expectation.manifest.second_operator
    return Sums() if operator is None else SecondOperatorLists(expectation, store, operator, fleet=fleet)


def largest_list(least: Mapping[str, int], *, min_devices: int, most: int) -> tuple[str, ...]:
    """Return as many devices as possible of which each accepts their number; none if they are fewer than `min_devices`.

    `least` are the submissions that each device wants in a list: one that wants more than there are joins a later list.
    A list has `most` devices at most.
    """
    chosen = dict(least)
    while chosen and max(chosen.values()) > min(len(chosen), most):
        limit = min(len(chosen), most)
        chosen = {device: wanted for device, wanted in chosen.items() if wanted <= limit}
    return tuple(sorted(chosen)[:most]) if len(chosen) >= min_devices else ()


class SecondOperatorLists(Sums):
    """The lists of a task with a second operator."""

    def __init__(
        self, expectation: Expectation, store: Store, operator: SecondOperator, *, fleet: str
    ) -> None:
        self._task, self._store, self._operator, self._fleet = expectation.task, store, operator, fleet
        self.topics = (fleet_topic(fleet, "sums/reply"),)
        self._expectation, self._values = expectation, number_of_values(expectation)
        self._most = MAX_SUMMED_VALUES // self._values
        """Devices in a list, at most."""
        self._transfers = Transfers(max_bytes=4 * self._values + 1024)
        self._due_s = 0.0
        self._adding: tuple[Mapping[str, bytes], Future[NDArray[np.uint32]]] | None = None
        """The submissions that a thread reads and adds up, and the sum of their masked values."""
        self._logged = 0, 0
        """The devices that are missing for a list, and those that it needs, as the log has them."""

    @property
    def stored(self) -> SumLists:
        return sums_of(self._store.facts, self._task)

    def _put(self, lists: SumLists) -> None:
        with self._store.transaction():
            put_sums(self._store.facts, lists)

    @property
    def is_requested(self) -> bool:
        pending = self.stored.pending
        return pending is not None and not pending.problem

    def members(self, counting: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return the submissions of all lists, the next one included; none if too few devices are in no list."""
        lists = self.stored
        if (pending := lists.pending) is not None and not pending.problem:
            listed = devices_of(lists)
        elif chosen := self._chosen(counting.keys() - set(lists.devices)):
            listed = {*lists.devices, *chosen}
        else:
            return {}
        return {device: digest for device, digest in counting.items() if device in listed}

    def _chosen(self, new: set[str]) -> tuple[str, ...]:
        """Return the devices of the next list, out of those that are in none."""
        required = self._operator.min_devices
        least = dict[str, int]()
        if len(new) >= required:
            wanted = self._store.submissions.wanted_devices(self._task)
            least = {device: wanted[device] for device in new & wanted.keys()}
        chosen = largest_list(least, min_devices=required, most=self._most)
        if not chosen:
            wanted_devices = max([required, *least.values()])  # an owner may require more
            missing = max(1, wanted_devices - len(new))
            if (missing, wanted_devices) != self._logged:
                text = "waiting for devices that are in no sum"
                event(log, logging.INFO, text, devices=missing, wanted=wanted_devices)
            self._logged = missing, wanted_devices
        return chosen

    def with_payloads(self, counting: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Return the submissions that are in no sum yet: the payloads of the others are deleted."""
        added = set(self.stored.devices)
        return {device: digest for device, digest in counting.items() if device not in added}

    def ready(self, plan: HeadRecord) -> bool:
        """Return True if the second operator has opened the list of a planned head, which is made if there is none.

        A list's submissions stay the same until it is opened or refused; a refused one is made again of other devices.
        """
        lists = self.stored
        earlier = set(lists.devices)
        new = {d: digest for d, digest in self._store.members(plan).items() if d not in earlier}
        if (pending := lists.pending) is None or (pending.problem and pending.members.keys() != new.keys()):
            self._make_list(plan, lists, new)
            return False
        if pending.masks and bytes.fromhex(pending.masks) not in self._store.blobs:
            self._put(replace(lists, pending=replace(pending, masks="")))
            self._due_s = 0.0
            return False
        return bool(pending.masks) and self._has_sum(plan, pending)

    def _has_sum(self, plan: HeadRecord, pending: PendingList) -> bool:
        """Return True if the sum of masked values is stored; one that is lost is made again of the submissions."""
        if bytes.fromhex(pending.masked) in self._store.blobs:
            return True
        try:
            total = self._sum({device: bytes.fromhex(digest) for device, digest in pending.members.items()})
        except BlobLost as error:
            self.abandon(f"the sum of its masked values is lost, and a submission is: {error}")
            self._store.heads.delete(plan.task, plan.version)
            return False
        if total is not None:
            self._put_sum(total)
        return total is not None

    def _put_sum(self, total: NDArray[np.uint32]) -> bytes:
        return self._store.blobs.put(encode(Tensors(values={"masked": to_tensor(total)})))

    def _make_list(self, plan: HeadRecord, lists: SumLists, new: Mapping[str, bytes]) -> None:
        """Store the next list, once its submissions are added up; delete a plan whose submissions have changed."""
        total = self._sum(new)
        if total is None:
            return
        masked = self._masked(new)
        least = {device: each.mask.min_devices for device, each in masked.items()}
        chosen = largest_list(least, min_devices=self._operator.min_devices, most=self._most)
        if chosen != tuple(sorted(new)):
            self._store.heads.delete(plan.task, plan.version)  # it is planned again of what counts now
            return
        pending = PendingList(
            members={device: new[device].hex() for device in sorted(new)},
            request=self._store.blobs.put(self._request_of(masked)).hex(),
            requested_s=time.time(),
            masked=self._put_sum(total).hex(),
        )
        self._put(replace(lists, pending=pending, seal_key=self._operator.seal_key.hex()))
        self._due_s = 0.0
        event(log, logging.INFO, "sum requested from the second operator", devices=len(new))

    def _masked(self, members: Mapping[str, bytes]) -> dict[str, MaskedSubmission]:
        """Return what a request has of each of these submissions; one that is not stored any more is missing."""
        stored = self._store.submissions.masked(self._task)
        return {
            device: stored[device].message
            for device, digest in members.items()
            if device in stored and stored[device].digest == digest
        }

    def _request_of(self, masked: Mapping[str, MaskedSubmission]) -> bytes:
        submissions = tuple(masked[device] for device in sorted(masked))
        return encode(
            SumRequest(
                task=self._task,
                seal_key=self._operator.seal_key,
                values=self._values,
                submissions=submissions,
            )
        )

    def _sum(self, members: Mapping[str, bytes]) -> NDArray[np.uint32] | None:
        """Return the sum of the masked values of a list, uint32 (values,); None while a thread adds them up.

        Raises:
            BlobLost: a submission is missing or damaged.
            StateError: one cannot be read, or the key to open it is lost.
        """
        if self._adding is None or self._adding[0] != members:
            self._adding = members, self._addition(dict(members))
            return None
        outcome = self._adding[1]
        if not outcome.done():
            return None
        self._adding = None
        return outcome.result()

    def _addition(self, members: Mapping[str, bytes]) -> "Future[NDArray[np.uint32]]":
        outcome, private_key = Future[NDArray[np.uint32]](), own_seal_key(self._store)

        def add() -> None:
            total = np.zeros(self._values, np.uint32)
            try:
                for device, payload in zip(
                    members, self._store.blobs.read_each(members.values()), strict=True
                ):
                    if isinstance(payload, BlobLost):
                        raise payload
                    total += self._opened(device, payload, private_key)
            except StateError as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(total)

        start_thread(add, name="add-masked", on_failure=outcome.set_exception)
        return outcome

    def _opened(self, device: str, payload: bytes, private_key: bytes) -> NDArray[np.uint32]:
        try:
            message = read_message(payload)
            if isinstance(message, Submission):
                return opened_values(message, self._expectation, device=device, private_key=private_key)
            raise Refused("malformed", "it is no submission")
        except Refused as error:
            raise StateError(f"the stored submission of {device} cannot be opened: {error}") from error

    def abandon(self, reason: str) -> None:
        """Leave the pending list out of all heads: its devices are in no other one of this task."""
        lists = self.stored
        if lists.pending is not None:
            payloads = payloads_of_pending(self._store.facts, self._task)
            with self._store.transaction():
                put_sums(self._store.facts, replace(end_pending(self._store, lists), problem=reason))
            self._store.blobs.delete(payloads)
            text, number = "list left out of all heads: start a new task", len(lists.pending.members)
            event(log, logging.ERROR, text, devices=number, reason=reason)

    def connected(self) -> None:
        self._due_s = 0.0

    def request(self) -> bytes | None:
        if time.monotonic() < self._due_s:
            return None
        self._due_s = time.monotonic() + REPEAT_S
        pending = self.stored.pending
        if pending is None or pending.masks:
            return None
        try:
            return self._store.blobs.read(bytes.fromhex(pending.request))
        except BlobLost as error:
            return self._made_again(pending, str(error))

    def _made_again(self, pending: PendingList, reason: str) -> bytes | None:
        """Return a request that is lost, made of the same submissions; None if one of them is replaced."""
        masked = self._masked({device: bytes.fromhex(digest) for device, digest in pending.members.items()})
        if len(masked) < len(pending.members):
            self.abandon(reason)
            return None
        self._store.blobs.put(data := self._request_of(masked))
        return data

    def take(self, payload: bytes) -> str:
        """Take a frame of a reply: the pending list is opened, or refused, and requested again later."""
        try:
            complete = self._transfers.take(decode(payload, Frame, max_bytes=MAX_FRAME_BYTES))
            if complete is None:
                return ""
            reply = decode(complete, SumReply, max_bytes=len(complete))
        except MalformedMessage as error:
            event(log, logging.WARNING, "reply of the second operator refused", reason=error)
            return ""
        lists = self.stored
        pending = lists.pending
        if pending is None or pending.masks or reply.request.hex() != pending.request:
            return ""
        if not is_own_sum(reply, public=self._operator.sign_key, fleet=self._fleet):
            text = "reply of the second operator refused"
            event(log, logging.WARNING, text, reason="its signature is invalid")
            return ""
        if problem := reply.problem or self._problem_of(reply):
            self._put(replace(lists, pending=replace(pending, problem=problem)))
            return f"the second operator opens no sum: {problem}"
        masks = self._store.blobs.put(complete).hex()
        self._put(replace(lists, pending=replace(pending, masks=masks, problem="")))
        event(log, logging.INFO, "sum opened by the second operator", devices=len(pending.members))
        return ""

    def _problem_of(self, reply: SumReply) -> str:
        if reply.masks is UNSET or reply.masks.dtype != "u4" or reply.masks.shape != (self._values,):
            return "its sum has another shape"
        try:
            to_array(reply.masks)
        except MalformedMessage as error:
            return str(error)
        return ""
