"""Answers requests for sums: checked, stored, and only then published."""

import contextlib
import logging
import queue
import time
from collections.abc import Callable

from protocol.errors import MalformedMessage, StateError, ThreadFailed
from protocol.log import event
from protocol.mqtt import reconnecting_session as mqtt
from protocol.mqtt.tls import BrokerAccess, Brokers
from protocol.service_manager import ServiceManager
from protocol.wire.arrays import to_tensor
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import MAX_CHUNK_BYTES, MAX_FRAME_BYTES, MAX_SUMMED, Frame, SumReply, SumRequest
from protocol.wire.repeated_transfers import Transfers
from protocol.wire.signing import sign_sum
from protocol.wire.topics import fleet_topic
from protocol.wire.transfer import chunk_bytes, frames_of
from sums_operator.checks import Policy, Refused, check, nothing, sum_of_masks
from sums_operator.state import Keys, OperatorState

log = logging.getLogger(__name__)

TICK_S = 1.0

MAX_REQUEST_BYTES = 512 * MAX_SUMMED
"""Bytes of a request, and of all unfinished ones together."""


class Operator:
    """Answers complete requests; the same request has the same answer, whatever happened in between.

    `alive` is called during an answer that takes long.
    """

    def __init__(
        self, keys: Keys, state: OperatorState, policy: Policy, *, alive: Callable[[], None] = nothing
    ) -> None:
        self._keys, self._state, self._policy, self._alive = keys, state, policy, alive

    def answer(self, payload: bytes) -> SumReply:
        """Return the signed sum of a list, which is stored, or a refusal; raises StateError if it cannot be stored."""
        digest, start_s = digest_of(payload), time.monotonic()
        try:
            request = self._decoded(payload)
            reply, is_repeated = self._opened(request, digest)
        except Refused as refused:
            event(
                log,
                logging.WARNING,
                "request refused",
                request=digest,
                reason=refused.reason,
                problem=str(refused),
            )
            self._state.count_refusal(refused.reason, str(refused))
            reply = SumReply(request=digest, problem=str(refused)[:256])
            return sign_sum(reply, key=self._keys.sign_key, fleet=self._policy.fleet)
        event(
            *(log, logging.INFO, "masks summed"),
            task=request.task,
            request=digest,
            devices=len(request.submissions),
            values=request.values,
            seconds=time.monotonic() - start_s,
            repeated=is_repeated or None,
        )
        return reply

    def _decoded(self, payload: bytes) -> SumRequest:
        try:
            return decode(payload, SumRequest, max_bytes=MAX_REQUEST_BYTES)
        except MalformedMessage as error:
            raise Refused("malformed", str(error)) from error

    def _opened(self, request: SumRequest, digest: bytes) -> tuple[SumReply, bool]:
        """Return the signed sum, and True if the list was answered before."""
        devices = [each.device for each in request.submissions]
        seal_key = self._keys.seal_key(request.seal_key)
        if seal_key is None:
            shown = request.seal_key.hex()[:16]
            raise Refused(
                "no_seal_key",
                f"there is no seal key {shown}: its task is over, or it is not of this operator",
            )
        is_repeated = self._state.is_answered(digest)
        if not is_repeated:
            check(request, self._policy, alive=self._alive)
            if self._state.is_of_another(request.seal_key, request.task):
                text = (
                    "the seal key is of another task: a new task needs the card of `protofleet-sums new-task`"
                )
                raise Refused("other_task", text)
            if (device := self._state.already_summed(request.task, devices)) is not None:
                text = (
                    "is in another list of this task, whose sum was opened: after a restore, start a new task"
                )
                raise Refused("overlap", f"{device} {text}")
        fleet = self._policy.fleet
        masks = sum_of_masks(request, fleet=fleet, seal_key=seal_key, alive=self._alive)
        if not is_repeated:
            self._state.add(digest, task=request.task, seal_key=request.seal_key, devices=devices)
        reply = SumReply(request=digest, masks=to_tensor(masks))
        return sign_sum(reply, key=self._keys.sign_key, fleet=fleet), is_repeated


class Service:
    """An operator's connection to its fleet."""

    def __init__(
        self,
        operator: Operator,
        broker: Brokers,
        access: BrokerAccess,
        *,
        fleet: str,
        manager: ServiceManager,
    ) -> None:
        self._operator, self._manager = operator, manager
        self._reply_topic = fleet_topic(fleet, "sums/reply")
        self._chunk_bytes = MAX_CHUNK_BYTES
        self._transfers = Transfers(max_bytes=MAX_REQUEST_BYTES)
        self._events: queue.SimpleQueue[mqtt.Event] = queue.SimpleQueue()
        self._session = mqtt.Session(
            broker,
            client_id=f"pf-{fleet}-sums",
            subscriptions=(fleet_topic(fleet, "sums/request"),),
            on_event=self._events.put,
            access=access,
            manual_ack=True,
        )

    def run(self) -> None:
        """Answer requests until interrupted; raises ThreadFailed if the connection's thread fails."""
        self._session.start()
        try:
            self._manager.ready()
            while True:
                self._manager.alive()
                with contextlib.suppress(queue.Empty):
                    self._handle(self._events.get(timeout=TICK_S))
        finally:
            self._session.stop()

    def _handle(self, found: mqtt.Event) -> None:
        match found:
            case mqtt.Connected(max_packet_bytes=limit, broker=broker):
                self._chunk_bytes = chunk_bytes(limit)
                event(log, logging.INFO, "connected", broker=broker)
            case mqtt.Disconnected(reason=reason, repeated=False, broker=broker, retry_s=retry_s):
                event(log, logging.WARNING, reason, broker=broker, retry_s=retry_s)
            case mqtt.Unsendable(topic=topic, reason=reason, repeated=False):
                event(log, logging.ERROR, "publication refused by the broker", topic=topic, reason=reason)
            case mqtt.Received(payload=payload):
                self._receive(payload)
                self._session.acknowledge(found)  # afterwards: the broker sends no more than is answered
            case ThreadFailed():
                raise found

    def _receive(self, payload: bytes) -> None:
        try:
            request = self._transfers.take(decode(payload, Frame, max_bytes=MAX_FRAME_BYTES))
            if request is None:
                return
            self._wait_until_sent()
            reply = encode(self._operator.answer(request))
        except MalformedMessage as error:
            event(log, logging.DEBUG, "message ignored", reason=str(error))
        except StateError as error:
            event(log, logging.ERROR, "request not answered", reason=str(error))
        else:
            for frame in frames_of(reply, digest=digest_of(reply), chunk_bytes=self._chunk_bytes):
                self._session.send(mqtt.Outgoing(self._reply_topic, encode(frame)))

    def _wait_until_sent(self) -> None:
        """Wait until the broker has the last reply, or the connection ends: one reply is in memory at a time."""
        while self._session.backlog:
            self._manager.alive()
            time.sleep(0.02)
