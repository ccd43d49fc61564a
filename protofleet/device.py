"""A device of a fleet in this program."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from edge_client.config import PrivacyUnit, membership
from edge_client.core.state import Mode
from edge_client.service import device as service
from edge_client.store.device_state import DeviceState
from edge_client.store.device_status import DeviceStatus, read_status
from edge_client.store.stored_values import Heads
from protocol.errors import ConfigError, StateError
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess
from protocol.storage.state_folder import default_state_folder
from protocol.wire.topics import is_name
from protofleet.embedded import Embedded
from protofleet.events import DeviceEvent, HeadInstalled, SubmissionReceived

if TYPE_CHECKING:
    from edge_client.graphs.session import Provider
    from protofleet.model import Model


class Device(Embedded):
    """A device of a fleet, as `edge-client` runs one, on threads of this program.

    Use it as a context manager, or with `start` and `stop`. A program may run several, each with a state directory of
    its own. Images are decoded and graphs run in child processes of this interpreter.

    Args:
        data: folder with one sub-folder of images per class, or a CSV file with the columns path and label; new images
            are found while it runs.
        broker: `HOST` or `HOST:PORT`; None for the one in the enrollment.
        state: state directory; None for the fleet's, `~/.local/state/protofleet/FLEET`.
        fleet: name of the fleet; None for the one in the enrollment, or else `default`.
        device_id: name of the device; None derives one from the machine.
        enrollment: directory made by `aggregator enroll`, for a closed fleet.
        access: TLS settings and credentials for the broker.
        holdout: fraction of the images that is held out to evaluate heads.
        backbones: local copies of the task's backbones, used instead of a download.
        provider: `cpu`, `cuda`, `tensorrt`, or `auto` for CUDA if available.
        threads: CPU threads of a run; None for all cores.
        rescan_s: seconds between scans for new images.
        aggregator_key: public key of the aggregator in hex, from `aggregator status`; None trusts the enrollment's, or
            else the first key that is received.
        max_epsilon: privacy budget for all submissions together; None leaves the limit to the task.
        max_delta: delta at which the budget is counted, unless the task's is smaller.
        max_local_epsilon: budget of what both operators of masked sums see together; None sets no limit.
        privacy_unit: the weakest unit of differential privacy of a task, `image` or `person`; both refuse tasks without
            one. None accepts any task.
        allow_non_private_tasks: take part in tasks without differential privacy, although there is a budget or a unit,
            or the device has made private submissions.
        second_operator: `sign_key` of the second operator in hex, from its operator.toml; tasks without it are refused.
            None refuses tasks with a second operator. Needs `max_epsilon`.
        on_head: called when a head is installed.
        on_submission: called when the aggregator has received a submission.
        on_event: called with every `events.DeviceEvent`. What else happens is logged, as by the program.

    Raises:
        ConfigError: a setting is wrong.
    """

    def __init__(  # noqa: PLR0913 - the options of `edge-client`
        self,
        data: str | os.PathLike[str],
        *,
        broker: str | None = None,
        state: str | os.PathLike[str] | None = None,
        fleet: str | None = None,
        device_id: str | None = None,
        enrollment: str | os.PathLike[str] | None = None,
        access: BrokerAccess = NO_AUTHENTICATION,
        holdout: float = 0.2,
        backbones: Sequence[str | os.PathLike[str]] = (),
        provider: "Provider" = "auto",
        threads: int | None = None,
        rescan_s: float = 30.0,
        aggregator_key: str | None = None,
        max_epsilon: float | None = None,
        max_delta: float = 1e-5,
        max_local_epsilon: float | None = None,
        privacy_unit: PrivacyUnit | None = None,
        allow_non_private_tasks: bool = False,
        second_operator: str | None = None,
        on_head: Callable[[HeadInstalled], None] | None = None,
        on_submission: Callable[[SubmissionReceived], None] | None = None,
        on_event: Callable[[DeviceEvent], None] | None = None,
    ) -> None:
        super().__init__(
            name="device",
            on_event=on_event,
            callbacks={HeadInstalled: on_head, SubmissionReceived: on_submission},
        )
        member = membership(
            Path(enrollment) if enrollment is not None else None,
            broker=broker,
            fleet=fleet,
            device_id=device_id,
            access=access,
            aggregator_key=_public_key("aggregator_key", aggregator_key),
        )
        if second_operator is not None and max_epsilon is None:
            raise ConfigError("second_operator needs max_epsilon, the limit of what a sum may reveal")
        if privacy_unit is not None and privacy_unit not in get_args(PrivacyUnit):
            raise ConfigError(f"expected a privacy_unit of 'image' or 'person', got {privacy_unit!r}")
        if member.broker is None:
            raise ConfigError("expected a broker as HOST or HOST:PORT, got none")
        if not is_name(member.fleet):
            raise ConfigError(
                f"expected a fleet of 1 to 64 letters, digits, '-' or '_', got {member.fleet!r}"
            )
        if not Path(data).exists():
            raise ConfigError(f"no images at {data}: expected a folder with one sub-folder per class")
        if not 0 <= holdout < 1:
            raise ConfigError(f"expected a held-out fraction from 0 to below 1, got {holdout}")
        self._folder = (
            Path(state) if state is not None else default_state_folder(f"protofleet/{member.fleet}")
        )
        self._member = member
        self._provider: Provider = provider
        self._threads = threads
        self._settings: dict[str, Any] = {
            "data": Path(data),
            "holdout": holdout,
            "backbones": tuple(map(Path, backbones)),
            "rescan_s": rescan_s,
            "max_epsilon": max_epsilon,
            "max_delta": max_delta,
            "max_local_epsilon": max_local_epsilon,
            "privacy_unit": privacy_unit,
            "allow_non_private_tasks": allow_non_private_tasks,
            "second_operator": _public_key("second_operator", second_operator),
        }
        self._mode = Mode.SERVICE
        self._service: service.Device | None = None

    @property
    def state(self) -> Path:
        """The state directory."""
        return self._folder

    def _run(self, on_ready: Callable[[], None]) -> None:
        with closing(DeviceState(self._folder, lock=True)) as store:
            settings = self._member.settings(
                device_id=store.device_id(self._member.device_id),
                mode=self._mode,
                provider=self._provider,
                threads=self._threads,
                **self._settings,
            )
            self._service = service.Device(settings, store)
            on_ready()
            self._service.run()

    def _request_stop(self) -> None:
        if self._service is not None:
            self._service.stop()

    def run_once(self, timeout_s: float | None = None) -> "Model":
        """Run until a head is installed and evaluated, as `edge-client --once` does, and return it.

        Raises:
            TimeoutError: it has not ended after the timeout, in seconds.
            ProtofleetError: it runs already, or has ended by this error.
        """
        self._mode = Mode.ONCE
        try:
            with self:
                if not self.wait(timeout_s):
                    raise TimeoutError(f"the device has not ended after {timeout_s:g} s")
        finally:
            self._mode = Mode.SERVICE
        return self.model()

    def status(self) -> DeviceStatus:
        """Return what `edge-client status --json` prints, as a struct.

        Raises:
            StateError: the device has never run.
        """
        with closing(DeviceState(self._folder, read_only=True)) as store:
            return read_status(store)

    def wait_for_head(self, timeout_s: float | None = None) -> "Model":
        """Wait until a head is installed, also by an earlier run, and return it with its backbones.

        Raises:
            TimeoutError: there is none after the timeout, in seconds.
            ProtofleetError: the device has ended.
        """
        self._wait_for(self._has_head, timeout_s, "head")
        return self.model()

    def model(self) -> "Model":
        """Return the head that is installed with its backbones; each prediction uses the newest one.

        Raises:
            ConfigError: no head is installed.
        """
        from protofleet.model import Model

        return Model.installed(state=self._folder, provider=self._provider, threads=self._threads)

    def _has_head(self) -> bool:
        try:
            with closing(DeviceState(self._folder, read_only=True)) as store:
                return store.get(Heads).installed is not None
        except StateError:
            return False


def _public_key(name: str, text: str | None) -> bytes | None:
    """Return 32 bytes from 64 hex digits; raises ConfigError for other text."""
    if text is None:
        return None
    if re.fullmatch("[0-9A-Fa-f]{64}", text) is None:
        raise ConfigError(f"expected a public key as {name}, 64 hex digits, got {text!r}")
    return bytes.fromhex(text)
