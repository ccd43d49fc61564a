"""The aggregator of a fleet in this program."""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from aggregator.config.task_file import load_task
from aggregator.config.training_packages import require_packages_of
from aggregator.job_processes import JobRunner
from aggregator.messaging.embedded_broker import EmbeddedBroker
from aggregator.server import events as service
from aggregator.server.aggregator import prepare, serve
from aggregator.server.program import reason_kept
from aggregator.status.collect import collect_status
from aggregator.status.model import Status
from aggregator.storage.open_store import open_store
from aggregator.supervised import failure_of
from protocol.cli import require_packages
from protocol.errors import ConfigError, StateError, ThreadFailed
from protocol.log import event, notify
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, parse_broker
from protocol.retry_delay import RestartDelay
from protocol.storage.state_folder import default_state_folder
from protofleet.embedded import Embedded
from protofleet.events import AggregatorEvent, AggregatorFailed, HeadActivated, SubmissionAccepted
from protofleet.model import Model
from protofleet.packages import needed_packages

log = logging.getLogger(__name__)


class Aggregator(Embedded):
    """The aggregator of a fleet, as `aggregator run` runs one, on threads of this program.

    Use it as a context manager, or with `start` and `stop`. Heads are trained in processes of their own. Once it has
    started, a failure that may pass, such as a full disk, makes it start again.

    Args:
        task: the task file (TOML).
        state: state directory; None for `~/.local/state/protofleet-aggregator`.
        broker: `HOST` or `HOST:PORT` to connect to, or that the embedded broker listens on.
        access: TLS settings and credentials for the broker.
        embedded_broker: run a broker in this program; it accepts any client.
        on_head: called when the fleet is to use another head, whose files are written then.
        on_submission: called when a device's submission is stored.
        on_event: called with every `events.AggregatorEvent`. What else happens is logged, as by the program.

    Raises:
        ConfigError: a setting or the task file is wrong.
        RuntimeMissing: the task needs the extra `train`, whose packages are not installed.
    """

    def __init__(
        self,
        task: str | os.PathLike[str],
        *,
        state: str | os.PathLike[str] | None = None,
        broker: str = "127.0.0.1",
        access: BrokerAccess = NO_AUTHENTICATION,
        embedded_broker: bool = False,
        on_head: Callable[[HeadActivated], None] | None = None,
        on_submission: Callable[[SubmissionAccepted], None] | None = None,
        on_event: Callable[[AggregatorEvent], None] | None = None,
    ) -> None:
        super().__init__(
            name="aggregator",
            on_event=on_event,
            callbacks={HeadActivated: on_head, SubmissionAccepted: on_submission},
        )
        if embedded_broker and access != NO_AUTHENTICATION:
            raise ConfigError("the embedded broker has neither encryption nor passwords: use mosquitto")
        require_packages("onnx", extras="aggregator,cpu")  # of jobs
        self._task, self._backbones = load_task(Path(task))
        require_packages_of(self._task)
        self._folder = Path(state) if state is not None else default_state_folder("protofleet-aggregator")
        self._broker = parse_broker(broker, tls=access.tls)
        self._access = access
        self._embedded_broker = embedded_broker
        self._queue: service.Events = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._broker_failure: ThreadFailed | None = None

    @property
    def state(self) -> Path:
        """The state directory."""
        return self._folder

    @needed_packages("Aggregator")
    def _run(self, on_ready: Callable[[], None]) -> None:
        self._stopping.clear()
        self._broker_failure = None
        with contextlib.ExitStack() as cleanup:
            if self._embedded_broker:
                broker = EmbeddedBroker(self._broker, on_failure=self._broker_failed)
                broker.start()
                cleanup.callback(broker.stop)
            jobs = JobRunner(lambda event: self._queue.put(event))  # noqa: PLW0108 - each run has a queue of its own
            cleanup.callback(jobs.stop)
            delay = RestartDelay()
            while not self._stopping.is_set():
                start_s = time.monotonic()
                try:
                    self._serve(on_ready, jobs)
                except Exception as error:
                    if not self._ready.is_set() or self._broker_failure is not None:
                        raise
                    failed = failure_of(error)
                    if failed.is_final:
                        raise
                    retry_s = delay.next_s(ran_s=time.monotonic() - start_s)
                    event(log, logging.ERROR, "aggregator ended", reason=failed.reason, retry_s=retry_s)
                    notify(AggregatorFailed(reason=failed.reason, retry_s=retry_s))
                    self._stopping.wait(retry_s)

    def _serve(self, on_ready: Callable[[], None], jobs: JobRunner) -> None:
        self._queue = queue.SimpleQueue()
        if self._stopping.is_set():
            return
        with closing(open_store(self._folder, lock=True)) as store, reason_kept(self._folder):
            prepared, access = prepare(self._task, self._backbones, store, self._access)
            on_ready()
            serve(prepared, store, broker=self._broker, access=access, events=self._queue, jobs=jobs)

    def _broker_failed(self, failure: ThreadFailed) -> None:
        self._broker_failure = failure
        self._queue.put(failure)

    def _request_stop(self) -> None:
        self._stopping.set()
        self._queue.put(service.Stop())

    def status(self) -> Status:
        """Return what `aggregator status --json` prints, as a struct.

        Raises:
            StateError: no aggregator has run on this state directory yet.
        """
        with closing(open_store(self._folder, read_only=True)) as store:
            return collect_status(store)

    def wait_for_head(self, timeout_s: float | None = None) -> Model:
        """Wait until the fleet uses a head, also of an earlier run, and return it with its backbones.

        Raises:
            TimeoutError: there is none after the timeout, in seconds.
            ProtofleetError: the aggregator has ended.
        """
        self._wait_for(lambda: self._model_file() is not None, timeout_s, "head")
        return self.model()

    def model(self) -> Model:
        """Return the head that the fleet uses with its backbones.

        Raises:
            ConfigError: there is none yet, or each device has a head of its own.
        """
        if (file := self._model_file()) is None:
            raise ConfigError(
                f"no model.onnx in {self._folder}: no head is activated yet, or each device has a head of its own"
            )
        return Model.load(file)

    def _model_file(self) -> Path | None:
        try:
            path = self.status().model_path
        except StateError:
            return None
        return Path(path) if path else None
