"""A closed fleet's task on its broker, and the findings of `doctor`."""

import json
import time
from typing import Any

import click
from click.testing import CliRunner

from aggregator.messaging.manifest_signer import identity_of
from protocol.mqtt.reconnecting_session import Connected, Drained, Outgoing
from protocol.wire.codec import encode
from protocol.wire.topics import fleet_topic
from tests.support.devices.device_factory import make_manifest
from tests.support.fleets.closed_fleet import FLEET, ClosedFleet
from tests.support.messages.manifests import signed_manifest
from tests.support.network.sessions import running

Findings = dict[str, list[dict[str, Any]]]
"""By check."""


def publish_task(closed: ClosedFleet, *, issued_s: float | None = None) -> None:
    """Let the broker retain a task that the aggregator has signed, a minute ago by default."""
    start_s = int(time.time() - 60 if issued_s is None else issued_s)
    payload = signed_manifest(
        encode(make_manifest(fleet=FLEET)), key=identity_of(closed.state), fleet=FLEET, channel="task", release=1,
        issued_s=start_s, expires_s=start_s + 3600,
    )  # fmt: skip
    with running(closed.broker, "aggregator", access=closed.aggregator_access()) as (session, log):
        log.wait(Connected)
        session.send(Outgoing(fleet_topic(FLEET, "task"), payload, retain=True))
        log.wait(Drained)


def findings(program: click.Command, *arguments: str) -> tuple[int, Findings]:
    """Run `doctor`; returns its exit status and its findings."""
    done = CliRunner().invoke(program, [*arguments, "--json"])
    assert done.stdout, (done.output, done.exception)
    found: Findings = {}
    for each in json.loads(done.stdout)["findings"]:
        found.setdefault(each["check"], []).append(each)
    return done.exit_code, found


def statuses(found: Findings) -> dict[str, str]:
    """Return the worst status of each check."""
    order = ("ok", "skipped", "warning", "failed")
    return {check: max((each["status"] for each in all_), key=order.index) for check, all_ in found.items()}
