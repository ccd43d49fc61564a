"""amqtt inside the aggregator's process: a broker for the demo and for tests, without installing one."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from protocol.cli import require_packages
from protocol.errors import ConfigError, ThreadFailed
from protocol.mqtt.tls import BrokerAddress
from protocol.threads import start_thread

log = logging.getLogger(__name__)

START_TIMEOUT_S = 20.0
SHUTDOWN_TRIES = 4


class _Subscriptions(dict[str, list[Any]]):
    """amqtt's table of subscriptions, copied for each message.

    amqtt iterates over it with pauses, and loses the message if a client connects or disconnects meanwhile.
    """

    def items(self) -> Any:
        return [(wanted, list(subscribers)) for wanted, subscribers in super().items()]


class EmbeddedBroker:
    """amqtt in its own thread: MQTT 3.1.1, with retained messages in memory.

    `on_failure` is called from the thread if it ends unexpectedly.
    """

    def __init__(self, address: BrokerAddress, *, on_failure: Callable[[ThreadFailed], None]) -> None:
        self._address = address
        self._on_failure = on_failure
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen.

        Raises:
            RuntimeMissing: amqtt is not installed.
            ConfigError: the address is in use or not local.
            ThreadFailed: the thread cannot be started.
        """
        require_packages("amqtt", extras="aggregator,cpu")
        self._thread = start_thread(self._run, name="embedded-broker", on_failure=self._on_failure)
        if not self._started.wait(START_TIMEOUT_S):
            raise ConfigError(f"the embedded broker did not start within {START_TIMEOUT_S:.0f} s")
        if self._failure is not None:
            raise ConfigError(
                f"the embedded broker cannot listen on {self._address}: {self._failure}; "
                "choose another address with --broker"
            ) from self._failure

    def stop(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        # A client that disconnects while it is refused is not worth a stack trace.
        self._loop.set_exception_handler(lambda _loop, context: log.debug("%s", context.get("message")))
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if self._started.is_set() and not self._stopping.is_set():
                raise
            self._failure = error.__cause__ or error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        from amqtt.broker import Broker as Amqtt

        for name in ("amqtt", "transitions"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # its errors are stack traces
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        # amqtt's own defaults listen on every interface.
        broker = Amqtt(
            {
                "listeners": {"default": {"type": "tcp", "bind": f"{host}:{self._address.port}"}},
                "timeout_disconnect_delay": 5,
                "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
            }
        )
        broker._subscriptions = _Subscriptions(broker._subscriptions)  # noqa: SLF001 - see there
        await broker.start()
        self._started.set()
        await self._stopping.wait()
        await _shut_down(broker)


async def _shut_down(broker: Any) -> None:
    """Close every connection.

    amqtt waits forever for a connection's reader that has missed its cancellation because a packet arrived at the
    same moment; canceled again, it ends, and the rest can be closed.
    """
    for _ in range(SHUTDOWN_TRIES):
        try:
            await asyncio.wait_for(broker.shutdown(), timeout=0.5)
        except TimeoutError:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
        else:
            return
