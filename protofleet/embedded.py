"""A device or an aggregator on a thread of this program, with its typed events passed to callbacks."""

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

from protocol.errors import ProtofleetError
from protocol.log import observed
from protocol.threads import start_thread

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0

POLL_S = 0.5


class Embedded(ABC):
    """A service on a thread of its own.

    Callbacks are called one after the other, from another thread: they may take long, and may stop the service. One
    that raises is logged, and the service goes on.
    """

    def __init__(
        self,
        *,
        name: str,
        on_event: Callable[[Any], None] | None,
        callbacks: Mapping[type, Callable[[Any], None] | None],
    ) -> None:
        self._name = name
        self._on_event = on_event
        self._callbacks = callbacks
        self._events: queue.SimpleQueue[object | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._dispatcher: threading.Thread | None = None
        self._ready, self._changed = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def start(self) -> Self:
        """Start the service; return once it holds its state directory and, of an aggregator, its task is prepared.

        Raises:
            ConfigError: a setting is wrong.
            StateError: the state directory cannot be used, or another program uses it.
            ProtofleetError: it runs already.
        """
        if self.is_running:
            raise ProtofleetError(f"the {self._name} runs already: stop it first")
        self._ready.clear()
        self._error = None
        self._events = queue.SimpleQueue()
        self._dispatcher = start_thread(self._dispatch, name=f"{self._name} callbacks", on_failure=self._fail)
        with observed(self._observe):
            self._thread = start_thread(self._guarded, name=self._name, on_failure=self._fail)
        self._ready.wait()
        self._raise_error()
        return self

    def stop(self) -> None:
        """Stop the service and wait for its end; does nothing if it does not run.

        Raises:
            ProtofleetError: it has ended by this error before, or does not end within STOP_TIMEOUT_S.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._request_stop()
        thread.join(STOP_TIMEOUT_S)
        dispatcher = self._dispatcher
        if dispatcher is not None and dispatcher is not threading.current_thread():
            dispatcher.join(STOP_TIMEOUT_S)
        if thread.is_alive():
            raise ProtofleetError(f"the {self._name} has not ended within {STOP_TIMEOUT_S:.0f} s")
        self._raise_error()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the service ends by itself; return False after the timeout, in seconds.

        Raises:
            ProtofleetError: it has ended by this error.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._raise_error()
        return not self.is_running

    @property
    def is_running(self) -> bool:
        """True from `start` until the service ends."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def _run(self, on_ready: Callable[[], None]) -> None:
        """Run until a stop is requested; calls `on_ready` once the state directory is in use."""

    @abstractmethod
    def _request_stop(self) -> None:
        """Make `_run` return soon."""

    def _wait_for(self, is_done: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        """Return once a condition holds, which events may change.

        Raises:
            TimeoutError: it does not hold after the timeout.
            ProtofleetError: the service has ended.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_done():
            self._raise_error()
            if not self.is_running:
                raise ProtofleetError(f"the {self._name} does not run, and has no {what}: start it")
            if until_s is not None and time.monotonic() >= until_s:
                raise TimeoutError(f"the {self._name} has no {what} after {timeout_s:g} s")
            self._changed.wait(POLL_S)
            self._changed.clear()

    def _guarded(self) -> None:
        try:
            self._run(self._ready.set)
        except ProtofleetError as error:
            if self._ready.is_set():
                log.error("%s ended: %s", self._name, error)
            self._error = error
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._ready.set()
            self._changed.set()
            self._events.put(None)

    def _fail(self, error: ProtofleetError) -> None:
        self._error = self._error or error

    def _raise_error(self) -> None:
        if (error := self._error) is not None:
            self._error = None
            raise error

    def _observe(self, event: object) -> None:
        self._changed.set()
        self._events.put(event)

    def _dispatch(self) -> None:
        while (event := self._events.get()) is not None:
            for callback in (self._callbacks.get(type(event)), self._on_event):
                if callback is None:
                    continue
                try:
                    callback(event)
                except Exception:
                    log.exception("a callback failed: %s", type(event).__name__)
