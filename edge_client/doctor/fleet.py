"""Checks of a device's way to its fleet: the broker, the access list, the task and the aggregator's key."""

import time
from collections.abc import Iterator

from edge_client.config import Settings
from edge_client.core import manifest_trust
from edge_client.core.manifest_trust import ManifestTrust, UntrustedManifest
from edge_client.store.device_state import DeviceState
from protocol.doctor.broker import BrokerProbe, check_network
from protocol.doctor.findings import Finding
from protocol.doctor.machine import check_clock
from protocol.errors import BadSignature, MalformedMessage
from protocol.mqtt.tls import BrokerAddress, addresses_of
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_MANIFEST_BYTES, Signed, TaskManifest
from protocol.wire.signing import open_manifest
from protocol.wire.topics import FROM_DEVICES, device_topic, fleet_topic

_OTHER = "protofleet-doctor"
"""A device that no fleet has."""


class FleetChecks:
    """The checks of one device; `task` is the task that the broker has, once they have run."""

    def __init__(self, settings: Settings, store: DeviceState | None) -> None:
        self._settings = settings
        self._store = store
        self.task: TaskManifest | None = None

    def run(self) -> Iterator[Finding]:
        """Yield the findings."""
        settings, trust = self._settings, self._trust()
        yield self._check_key(trust)
        if settings.broker is None:
            yield Finding(
                "broker", "skipped", "no broker was given", "give --broker HOST[:PORT], or --enrollment"
            )
            return
        for broker in addresses_of(settings.broker):
            yield from self._check_broker(broker, trust)

    def _check_broker(self, broker: BrokerAddress, trust: ManifestTrust) -> Iterator[Finding]:
        settings = self._settings
        yield from (network := check_network(broker, settings.access))
        if any(each.status == "failed" for each in network):
            return
        if settings.access.certificate is not None and self._store is not None and self._store.is_locked():
            text = "the device program runs, and a login with its certificate would interrupt it"
            yield Finding(
                "login", "skipped", text, "see `edge-client status`, or stop the program for this check"
            )
            return
        yield from self._check_login(broker, trust)

    def _check_login(self, broker: BrokerAddress, trust: ManifestTrust) -> Iterator[Finding]:
        settings = self._settings
        fleet, device = settings.fleet, settings.device_id
        task = fleet_topic(fleet, "task")
        state = device_topic(fleet, device, "state")
        own = (device_topic(fleet, device, "ack"), device_topic(fleet, device, "blk"), state)
        with BrokerProbe(broker, settings.access, subscriptions=(task, *own)) as probe:
            opened = probe.open()
            yield opened
            if opened.status != "ok":
                return
            yield probe.check_packets(state, comes_back=True)
            yield from self._check_task(probe.retained(task), trust)
            yield from probe.check_qos()
            yield from probe.check_writes(
                allowed=[device_topic(fleet, device, channel) for channel in FROM_DEVICES],
                denied=[task, fleet_topic(fleet, "head"), device_topic(fleet, _OTHER, "info")],
                is_closed=settings.identity.signing_key is not None,
            )

    def _check_task(self, payload: bytes | None, trust: ManifestTrust) -> Iterator[Finding]:
        fleet = self._settings.fleet
        if payload is None:
            action = "start the aggregator, and compare --fleet with the task file's `fleet`"
            yield Finding(
                "task",
                "failed",
                f"the broker has no task of fleet {fleet}: nothing is retained on {fleet_topic(fleet, 'task')}",
                action,
            )
            return
        try:
            signed = open_manifest(payload, fleet=fleet, channel="task")
            manifest_trust.verify(trust, "task", signed)
            self.task = decode(signed.body, TaskManifest, max_bytes=MAX_MANIFEST_BYTES)
        except (UntrustedManifest, BadSignature, MalformedMessage) as error:
            action = (
                "compare the key with `aggregator status`; another client may publish on the fleet's topics"
            )
            yield Finding("task", "failed", str(error), action)
            return
        task = self.task
        yield Finding("task", "ok", f"fleet {fleet}: {task.algorithm}, {len(task.classes)} classes")
        yield self._check_age(signed)

    def _check_age(self, signed: Signed) -> Finding:
        """Compare the clock with the dates of the fleet's newest manifest."""
        if time.time() > signed.expires_s:
            action = "set the clock, or start the aggregator: it renews its manifests"
            return Finding("clock", "failed", "by this clock, the fleet's task has expired", action)
        return check_clock(known_s=signed.issued_s - 300, source="the fleet's task")

    def _trust(self) -> ManifestTrust:
        settings = self._settings
        return manifest_trust.with_operator_key(
            self._store.get(ManifestTrust) if self._store is not None else ManifestTrust(),
            settings.identity,
        )

    def _check_key(self, trust: ManifestTrust) -> Finding:
        if trust.key is None:
            text = "no key of the aggregator is known: the first one received will be trusted"
            return Finding("key", "warning", text, "give --aggregator-key, which `aggregator status` shows")
        origin = (
            "given by the operator" if trust.configured is not None else "the first one that was received"
        )
        return Finding("key", "ok", f"the aggregator's key {trust.key.hex()[:16]}... is pinned, {origin}")
