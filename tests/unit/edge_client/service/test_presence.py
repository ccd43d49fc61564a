"""Presences: the aggregator's, the device's own, and those of others on its topic."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edge_client.agent import events
from edge_client.agent.state import Mode
from edge_client.service.device import Device
from edge_client.storage.device_state import DeviceState
from protocol.errors import ConfigError, ProtofleetError
from protocol.mqtt.reconnecting_session import Connected, Received
from protocol.wire.codec import decode, encode
from protocol.wire.messages import Presence, PresenceState
from protocol.wire.presence import Duplicate
from protocol.wire.topics import DeviceChannel, device_topic, fleet_topic
from tests.support.devices.device_factory import info_of, make_settings
from tests.unit.edge_client.service.devices import capture, make_device

OWN_STATE = device_topic("f", "device", "state")


def test_a_reconnected_aggregator_is_noticed(tmp_path: Path, store: DeviceState) -> None:
    """A live presence counts, a retained one only with a new epoch."""
    device = make_device(tmp_path, store)

    def receive(state: PresenceState, epoch: int, *, retained: bool) -> list[object]:
        payload = encode(Presence(state=state, epoch=epoch))
        return list(device._receiver.receive(fleet_topic("f", "state"), payload, retained=retained))

    started = [events.OutboxSeen(()), events.AggregatorStarted()]
    assert receive("online", 7, retained=True) == started
    assert receive("online", 7, retained=True) == []
    assert receive("offline", 7, retained=False) == []
    assert receive("online", 7, retained=False) == [events.AggregatorReconnected()]
    assert receive("online", 8, retained=False) == started


@pytest.mark.parametrize(("mode", "channels"), [(Mode.SERVICE, ["state", "info"]), (Mode.DRY_RUN, [])])
def test_presence_and_info_are_published_at_every_connection(
    tmp_path: Path, store: DeviceState, mode: Mode, channels: list[DeviceChannel]
) -> None:
    """A dry run publishes neither."""
    device = Device(make_settings(tmp_path, mode=mode), store)
    sent = capture(device)
    for _ in range(2):
        device._handle(Connected(None))
    assert [each.topic for each in sent] == [device_topic("f", "device", name) for name in channels] * 2


@pytest.mark.parametrize(
    ("presence", "is_another"),
    [
        (lambda _: Presence(state="online", epoch=2**63 - 1), False),
        (lambda own: Presence(state="offline", epoch=own - 1), False),
        (lambda own: Presence(state="online", epoch=own + 1), True),
    ],
    ids=["impossible epoch", "old will", "second program"],
)
def test_a_presence_on_the_own_topic_is_replaced_unless_it_is_newer(
    tmp_path: Path, store: DeviceState, presence: Callable[[int], Presence], *, is_another: bool
) -> None:
    """An impossible epoch, which a broker retains, must not keep the device from starting."""
    device = make_device(tmp_path, store)
    device._agent.state = replace(device._agent.state, connected=True)
    sent, own = capture(device), device._publisher.presence.epoch
    received = Received(device_topic("f", "device", "state"), encode(presence(own)), retained=True)
    if is_another:
        with pytest.raises(ProtofleetError, match="another edge-client is online"):
            device._handle(received)
        return
    device._handle(received)
    assert [decode(each.payload, Presence, max_bytes=1024).epoch for each in sent] == [own]


def test_a_forged_presence_does_not_stop_an_enrolled_device(tmp_path: Path, store: DeviceState) -> None:
    """Only the device's own key counts: the forged one is counted, and replaced."""
    device = Device(make_settings(tmp_path, signing_key=b"s" * 32), store)
    device._agent.state = replace(device._agent.state, connected=True)
    sent, own = capture(device), device._publisher.presence.epoch
    device._handle(Received(OWN_STATE, encode(Presence(state="online", epoch=own + 1))))
    assert [each.topic for each in sent] == [OWN_STATE, device_topic("f", "device", "info")]
    assert info_of(device).refused_messages == {"signature": 1}


def test_two_keys_under_one_name_do_not_answer_each_other_forever(tmp_path: Path) -> None:
    """Such as an enrollment and its renewal, both running: at most one of them publishes again."""
    keys = (b"s" * 32, b"r" * 32)
    devices = [
        Device(make_settings(tmp_path, signing_key=key), DeviceState(tmp_path / key.decode()[:1]))
        for key in keys
    ]
    sent = [capture(device) for device in devices]
    for device in devices:
        device._handle(Connected(None))
    for _ in range(3):
        seen = [[each for each in some if each.topic == OWN_STATE] for some in sent]
        for device, some, others in zip(devices, sent, reversed(seen), strict=True):
            some.clear()
            for each in others:
                device._handle(Received(each.topic, each.payload))
    assert sum(len([each for each in some if each.topic == OWN_STATE]) for some in sent) == 0


def test_a_copied_device_stays_out_until_it_takes_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Equal clocks, equal epochs: the one that starts later continues, and both report the other."""
    settings = make_settings(tmp_path, signing_key=b"s" * 32)
    states = [DeviceState(tmp_path / name) for name in ("one", "two")]

    def connected(store: DeviceState) -> Device:
        device = Device(settings, store)
        capture(device)
        device._handle(Connected(None, "192.0.2.7"))
        return device

    def said(device: Device, state: PresenceState = "online") -> Received:
        return Received(OWN_STATE, device._publisher.presence.outgoing(state).payload)

    older, newer = (connected(store) for store in states)
    older._handle(said(older))
    newer._handle(said(older))
    newer._handle(said(newer))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"was started later, at .*192.0.2.7.*: this one stays out"):
            older._handle(said(newer))
        with pytest.raises(ConfigError, match="run `edge-client take-over`"):
            Device(settings, states[0])
        newer._handle(said(older, "replaced"))
        # It takes part: what it reports is no problem, and says what to do.
        assert info_of(newer).problem == ""
        assert "or enroll it under a name of its own; it ran at " in info_of(newer).warning
        assert caplog.text.count("a copy of this device was started earlier, and stays out") == 1
        assert all("192.0.2.7" in store.get(Duplicate).summary for store in states)
        assert "continues at the next start" in states[0].take_over()
        # The copy that took over continues; the other one stays out in its turn.
        caplog.clear()
        older, newer = newer, connected(states[0])
        newer._handle(said(newer))
        states.reverse()
