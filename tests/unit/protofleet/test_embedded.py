"""Devices and an aggregator in one process, with a broker: heads, callbacks, starts and stops."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import protofleet
from aggregator.http.commands import run_command
from aggregator.security.enrollment import enroll
from aggregator.storage.open_store import open_store
from edge_client.config import Settings
from edge_client.core.state import Mode
from edge_client.service import device as service
from edge_client.store.device_state import DeviceState
from protocol import retry_delay
from protocol.errors import ConfigError, StateError, ThreadFailed
from protocol.mqtt.reconnecting_session import BrokerAddress
from protofleet import events
from tests.support.fleets.fleet import wait_until, write_digits, write_task
from tests.support.network.brokers import amqtt

TIMEOUT_S = 120.0
CLASSES = ("0", "1", "2", "3")


@pytest.fixture
def broker(address: BrokerAddress) -> Iterator[str]:
    with amqtt(address):
        yield f"{address.host}:{address.port}"


Kind = TypeVar("Kind")


class Events:
    """Events of one service, in their order."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self._changed = threading.Condition()

    def __call__(self, event: object) -> None:
        with self._changed:
            self.seen.append(event)
            self._changed.notify_all()

    def wait_for(self, kind: type[Kind]) -> Kind:
        """Return the first event of this class."""

        def found() -> Kind | None:
            return next((event for event in self.seen if isinstance(event, kind)), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, TIMEOUT_S), [*map(str, self.seen)]
            event = found()
            assert event is not None
            return event


def device(folder: Path, broker: str, number: int, **options: object) -> protofleet.Device:
    """Return a device with eight images of each class, which no other device has."""
    data = write_digits(folder / f"photos-{number}", classes=[0, 1, 2, 3], start=8 * number, each=8)
    return protofleet.Device(
        data, broker=broker, state=folder / f"device-{number}", device_id=f"shed-{number}",
        provider="cpu", threads=1, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def test_fleet_in_one_process(
    tmp_path: Path, address: BrokerAddress, caplog: pytest.LogCaptureFixture
) -> None:
    """Two devices and an aggregator with its broker train a head, report events, and classify with it.

    A callback that fails is logged, and later events arrive all the same. Another device runs once.
    """
    task = write_task(tmp_path, classes=CLASSES, quorum=2)
    uploads, heads, installed, received = Events(), Events(), Events(), Events()
    broker = f"{address.host}:{address.port}"
    aggregator = protofleet.Aggregator(
        task, state=tmp_path / "state", broker=broker, embedded_broker=True, on_submission=uploads, on_head=heads
    )  # fmt: skip
    every = Events()

    def fail(event: object) -> None:
        every(event)
        if isinstance(event, events.BrokerConnected):
            raise TypeError("a bug")

    first = device(tmp_path, broker, 0, on_head=installed, on_submission=received, on_event=fail)
    with aggregator, first, device(tmp_path, broker, 1) as second:
        image = tmp_path / "photos-0" / "3"
        path = next(iter(sorted(image.iterdir())))
        models = [each.wait_for_head(TIMEOUT_S) for each in (aggregator, first, second)]
        predictions = [model.predict(path) for model in models]
        assert {each.label for each in predictions} == {predictions[0].label}
        reasons = [(each.prior, each.prior_reason) for each in predictions]
        assert reasons[1:] == [("labels", "fewer than 20 predictions")] * 2, "of the devices' labeled images"
        assert reasons[0] == ("none", "no evidence of uneven classes"), "model.onnx has none"
        assert models[0].classes == CLASSES
        assert heads.wait_for(events.HeadActivated).version == 1
        used = installed.wait_for(events.HeadInstalled)
        assert (used.version, used.round, used.images) == (1, None, 4)
        digest = received.wait_for(events.SubmissionReceived).submission
        assert digest == first.status().submission
        assert {each.device for each in uploads.seen if isinstance(each, events.SubmissionAccepted)} == {
            "shed-0",
            "shed-1",
        }
        followed = every.wait_for(events.TaskReceived)
        assert (followed.algorithm, followed.classes) == ("fedtc", CLASSES)
        every.wait_for(events.HeadInstalled)
        kinds = [type(each) for each in every.seen]
        assert kinds.index(events.BrokerConnected) < kinds.index(events.HeadInstalled), "after a failure"
        assert "a callback failed: BrokerConnected" in caplog.text
        status = aggregator.status()
        (head,) = status.heads
        identities = {(each.head_version, each.round, each.head, each.task) for each in predictions}
        assert identities == {(1, None, head.sha256, status.task)}
        assert status.running
        assert (second.status().device_id, second.status().problem) == ("shed-1", "")
        assert len(status.devices) == 2
        once = device(tmp_path, broker, 2, aggregator_key=status.aggregator_key)
        assert once.run_once(TIMEOUT_S).predict(path).head == predictions[0].head
        assert not once.is_running
    assert not any(each.is_running for each in (aggregator, first, second))
    assert not aggregator.status().running
    with aggregator.model() as fused, first.model() as installed_model:
        assert fused.predict(path).label == installed_model.predict(path).label
    installed_model.close()
    with pytest.raises(protofleet.ProtofleetError, match="closed"):
        installed_model.predict(path)


def test_device_starts_again_after_a_stop(tmp_path: Path, broker: str) -> None:
    """A stop ends its threads and frees the state directory; it can be used by another object, too."""
    threads, seen = threading.active_count(), Events()
    one, other = (device(tmp_path, broker, 0, on_event=seen) for _ in range(2))
    for each in (one, one, other):
        seen.seen.clear()
        with each:
            seen.wait_for(events.BrokerConnected)
            with pytest.raises(protofleet.ProtofleetError, match="runs already"):
                each.start()
        assert not each.is_running
        each.stop()
    wait_until(
        "the end of its threads, but for the watchdog of ONNX Runtime",
        lambda: threading.active_count() <= threads + 1,
        diagnostics=lambda: str([thread.name for thread in threading.enumerate()]),
    )


def test_state_directory_of_a_running_device_is_refused(tmp_path: Path, broker: str) -> None:
    with device(tmp_path, broker, 0), pytest.raises(StateError, match="already runs"):
        device(tmp_path, broker, 0).start()


def test_callback_may_stop_the_service(tmp_path: Path, broker: str) -> None:
    """Stopping from a callback waits for no one."""
    stopped = threading.Event()

    def call(event: object) -> None:
        if isinstance(event, events.BrokerConnected):
            one.stop()
            stopped.set()

    one = device(tmp_path, broker, 0, on_event=call)
    one.start()
    assert stopped.wait(TIMEOUT_S)
    assert one.wait(0)


def test_keys_limits_and_the_mode_reach_the_device(
    tmp_path: Path, broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has not ended after its timeout is stopped, and the next one is a service again."""
    seen: list[Settings] = []

    class Recorded(service.Device):
        def __init__(self, settings: Settings, store: DeviceState) -> None:
            seen.append(settings)
            super().__init__(settings, store)

    monkeypatch.setattr(service, "Device", Recorded)
    keys = {"aggregator_key": "AB" * 32, "second_operator": "cd" * 32}
    one = device(tmp_path, broker, 0, **keys, max_epsilon=3.0, privacy_unit="person")
    with pytest.raises(TimeoutError, match="not ended after 0 s"):
        one.run_once(0)
    with one:
        pass
    assert [settings.mode for settings in seen] == [Mode.ONCE, Mode.SERVICE]
    assert seen[0].identity.aggregator_key == bytes([0xAB] * 32)
    assert seen[0].second_operator == bytes([0xCD] * 32)
    assert (seen[0].max_epsilon, seen[0].privacy_unit) == (3.0, "person")


def test_head_that_does_not_come_is_a_timeout(tmp_path: Path, broker: str) -> None:
    with device(tmp_path, broker, 0) as one:
        with pytest.raises(TimeoutError, match="no head after 0 s"):
            one.wait_for_head(0)
        with pytest.raises(ConfigError, match="no head"):
            one.model()
    with pytest.raises(protofleet.ProtofleetError, match="start it"):
        one.wait_for_head()


def test_settings_are_checked_before_the_start(tmp_path: Path) -> None:
    """Errors are those of the programs."""
    with pytest.raises(ConfigError, match="no images at"):
        protofleet.Device(tmp_path / "missing", broker="127.0.0.1")
    with pytest.raises(ConfigError, match="expected a broker"):
        protofleet.Device(tmp_path)
    with pytest.raises(ConfigError, match="public key as aggregator_key, 64 hex digits, got 'ab'"):
        protofleet.Device(tmp_path, broker="127.0.0.1", aggregator_key="ab")
    with pytest.raises(ConfigError, match="second_operator needs max_epsilon"):
        protofleet.Device(tmp_path, broker="127.0.0.1", second_operator="ab" * 32)
    with pytest.raises(ConfigError, match="expected a privacy_unit of 'image' or 'person', got 'persons'"):
        protofleet.Device(tmp_path, broker="127.0.0.1", privacy_unit="persons")  # type: ignore[arg-type]
    store = open_store(tmp_path / "aggregator")
    enroll(store, "shed-1", broker="broker.example", fleet="orchard", out=tmp_path / "shed-1")
    store.close()
    with pytest.raises(ConfigError, match="omit --fleet, or use the other enrollment"):
        protofleet.Device(tmp_path, enrollment=tmp_path / "shed-1", fleet="vineyard")
    assert protofleet.Device(tmp_path, enrollment=tmp_path / "shed-1").state.name == "orchard"
    with pytest.raises(ConfigError, match="cannot read the task file"):
        protofleet.Aggregator(tmp_path / "missing.toml")
    task = write_task(tmp_path, classes=CLASSES)
    with pytest.raises(ConfigError, match="use mosquitto"):
        protofleet.Aggregator(task, embedded_broker=True, access=protofleet.BrokerAccess(username="a"))
    aggregator = protofleet.Aggregator(task, state=tmp_path / "state")
    with pytest.raises(ConfigError, match=r"no model\.onnx"):
        aggregator.model()


def test_broker_that_cannot_listen_ends_the_aggregator(tmp_path: Path, broker: str) -> None:
    """The error of the thread is raised where the program waits."""
    task = write_task(tmp_path, classes=CLASSES)
    aggregator = protofleet.Aggregator(task, state=tmp_path / "state", broker=broker, embedded_broker=True)
    with pytest.raises(ConfigError, match="cannot listen"):
        aggregator.start().wait(TIMEOUT_S)
    assert not aggregator.is_running


def test_aggregator_that_fails_starts_again(
    tmp_path: Path, address: BrokerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a delay, and it says why; its broker continues meanwhile, and commands reach the next start."""
    monkeypatch.setattr(retry_delay, "FIRST_DELAY_S", 0.01)
    broker, failures, seen = f"{address.host}:{address.port}", Events(), Events()
    task = write_task(tmp_path, classes=CLASSES)
    aggregator = protofleet.Aggregator(
        task, state=tmp_path / "state", broker=broker, embedded_broker=True, on_event=failures
    )
    with aggregator, device(tmp_path, broker, 0, on_event=seen):
        seen.wait_for(events.BrokerConnected)
        aggregator._queue.put(ThreadFailed("the disk has failed"))  # noqa: SLF001 - no real fault is that quick
        failed = failures.wait_for(events.AggregatorFailed)
        assert failed == events.AggregatorFailed(reason="the disk has failed", retry_s=0.01)
        wait_until(
            "its next start", lambda: aggregator.status().running, diagnostics=lambda: str(failures.seen)
        )
        with pytest.raises(ConfigError, match="there is no candidate to promote"):
            run_command(aggregator.state, "promote", b"")
        assert not any(isinstance(each, events.BrokerDisconnected) for each in seen.seen)
    assert not aggregator.status().running
