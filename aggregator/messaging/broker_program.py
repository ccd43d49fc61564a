"""The embedded broker as a program of `aggregator run`, so that no restart of another one cuts the fleet."""

import logging
import queue
import time
from multiprocessing.connection import Connection

import msgspec

from aggregator.supervised import run_program
from protocol.errors import ConfigError, ThreadFailed
from protocol.log import event
from protocol.mqtt.tls import BrokerAddress
from protocol.service_manager import ServiceManager

log = logging.getLogger(__name__)

LISTEN_S = 3.0
"""Time for the broker of a supervisor that was killed to release the port."""


class BrokerSettings(msgspec.Struct, frozen=True):
    """The settings of the program."""

    address: BrokerAddress
    verbose: bool


def run(settings: BrokerSettings, _pipe: Connection) -> None:
    """Run the broker until SIGTERM.

    Raises:
        ConfigError: it cannot listen on the address.
        ThreadFailed: its thread has ended.
    """
    from protocol.cli import start_logging

    start_logging(verbose=settings.verbose)
    from aggregator.messaging.embedded_broker import EmbeddedBroker

    failures = queue.SimpleQueue[ThreadFailed]()
    deadline_s = time.monotonic() + LISTEN_S
    while True:
        broker = EmbeddedBroker(settings.address, on_failure=failures.put)
        try:
            broker.start()
            break
        except ConfigError as error:
            if time.monotonic() >= deadline_s:
                raise
            event(log, logging.INFO, "waiting for the address of the embedded broker", reason=error)
            time.sleep(0.5)
    try:
        ServiceManager().ready()
        raise failures.get()
    finally:
        broker.stop()


if __name__ == "__main__":
    run_program(BrokerSettings, run)
