"""An aggregator for as long as its program wants: one task after the other, and the embedded broker."""

import contextlib
import queue

from aggregator.messaging.embedded_broker import EmbeddedBroker
from aggregator.service.aggregator import Aggregator
from aggregator.service.event_loop import Event
from aggregator.storage.store import Store
from aggregator.tasks.task_preparation import Task, task_to_serve
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, Brokers, addresses_of


def serve(
    prepared: Task,
    store: Store,
    *,
    broker: Brokers,
    access: BrokerAccess = NO_AUTHENTICATION,
    embedded_broker: bool = False,
    events: queue.SimpleQueue[Event] | None = None,
    external_training: bool = False,
    is_coordinator: bool = False,
) -> None:
    """Serve a fleet, with a broker in this process if asked for, until `Stop` is put into `events`.

    With `external_training`, programs of their own train, `aggregator train`; with `is_coordinator`, such programs
    take the uploads, `aggregator receive`.

    Raises:
        ConfigError: the embedded broker cannot listen.
        StateError: the state directory cannot be used.
        ThreadFailed: a thread that it depends on has ended.
    """
    events = queue.SimpleQueue() if events is None else events
    with contextlib.ExitStack() as cleanup:
        if embedded_broker:
            embedded = EmbeddedBroker(addresses_of(broker)[0], on_failure=events.put)
            embedded.start()
            cleanup.callback(embedded.stop)
        is_stopped = False
        while not is_stopped:
            served = task_to_serve(prepared, store)
            aggregator = Aggregator(
                served,
                store,
                broker=broker,
                access=access,
                events=events,
                external_training=external_training,
                is_coordinator=is_coordinator,
            )
            aggregator.run()
            is_stopped = aggregator.is_stopped
