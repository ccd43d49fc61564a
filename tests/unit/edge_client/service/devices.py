"""Devices without a broker, what they publish, and signed rounds."""

from dataclasses import replace
from pathlib import Path

from edge_client.agent import events
from edge_client.service.device import Device
from edge_client.storage.device_state import DeviceState
from protocol.mqtt.reconnecting_session import Outgoing, Received
from protocol.wire.topics import fleet_topic
from tests.support.devices.device_factory import make_settings
from tests.support.devices.round_factory import TASK, make_task
from tests.support.messages.manifests import signed_manifest


def make_device(folder: Path, store: DeviceState) -> Device:
    device = Device(make_settings(folder), store)
    device._agent.step(events.TaskSeen(TASK, make_task(store.blobs)))
    device._receiver._task = TASK
    device._agent.state = replace(device._agent.state, installed=b"h" * 32, building=True)
    return device


def capture(device: Device) -> list[Outgoing]:
    """Return the list to which everything is added that the device publishes."""
    sent: list[Outgoing] = []
    device._publisher.send = sent.append  # type: ignore[method-assign, assignment]
    return sent


def signed_round(body: bytes, *, key: bytes = b"k" * 32, release: int = 1) -> Received:
    payload = signed_manifest(body, key=key, fleet="f", channel="round", release=release)
    return Received(fleet_topic("f", "round"), payload)
