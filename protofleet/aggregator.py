"""The aggregator of a fleet in this program."""

import os
import queue
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from aggregator.config.task_file import load_task
from aggregator.config.training_packages import require_packages_of
from aggregator.server import events as service
from aggregator.server.aggregator import prepare, serve
from aggregator.status.collect import collect_status
from aggregator.status.model import Status
from aggregator.storage.open_store import open_store
from protocol.errors import ConfigError, StateError
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, parse_broker
from protocol.storage.state_folder import default_state_folder
from protofleet.embedded import Embedded
from protofleet.events import AggregatorEvent, HeadActivated, SubmissionAccepted
from protofleet.model import Model
from protofleet.packages import needed_packages


class Aggregator(Embedded):
    """The aggregator of a fleet, as `aggregator run` runs one, on threads of this program.

    Use it as a context manager, or with `start` and `stop`. Heads are trained in processes of their own.

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
        self._task, self._backbones = load_task(Path(task))
        require_packages_of(self._task)
        self._folder = Path(state) if state is not None else default_state_folder("protofleet-aggregator")
        self._broker = parse_broker(broker, tls=access.tls)
        self._access = access
        self._embedded_broker = embedded_broker
        self._queue: service.Events = queue.SimpleQueue()

    @property
    def state(self) -> Path:
        """The state directory."""
        return self._folder

    @needed_packages("Aggregator")
    def _run(self, on_ready: Callable[[], None]) -> None:
        self._queue = queue.SimpleQueue()
        with closing(open_store(self._folder, lock=True)) as store:
            prepared, access = prepare(self._task, self._backbones, store, self._access)
            on_ready()
            serve(
                *(prepared, store),
                broker=self._broker,
                access=access,
                embedded_broker=self._embedded_broker,
                events=self._queue,
            )

    def _request_stop(self) -> None:
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
