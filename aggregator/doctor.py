"""`aggregator doctor`: what keeps the aggregator from serving its fleet."""

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from aggregator.cluster_modules import BLOBS, cluster_module
from aggregator.config.schema import TaskFile
from aggregator.config.task_file import load_task
from aggregator.config.training_packages import INSTALL, missing_packages
from aggregator.security.identity import aggregator_access, identity_folder
from aggregator.storage.open_store import has_database, open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import BlobLocation
from aggregator.tasks.task_preparation import checked_backbone
from protocol.doctor.broker import BrokerProbe, check_network
from protocol.doctor.findings import Finding
from protocol.doctor.machine import check_clock, check_disk
from protocol.errors import NoStateError, ProtofleetError, pip_command
from protocol.mqtt.tls import BrokerAccess, BrokerAddress, Brokers, addresses_of, expiry_warning
from protocol.storage.keyfile import read_key
from protocol.wire.signing import public_key
from protocol.wire.topics import FleetChannel, device_filters, device_topic, fleet_topic

PACKAGES = ("onnx", "onnxruntime", "scipy")
"""Packages that `aggregator run` imports, beside those of every install."""

PROBE_DEVICE = "protofleet-doctor"
"""Device name used by the checks; no fleet uses it."""


@dataclass(frozen=True)
class Surroundings:
    """The files, folder and broker that the aggregator is started with."""

    task: Path | None
    state: Path
    broker: Brokers
    access: BrokerAccess
    store: str = ""
    blobs: str = ""


@dataclass(frozen=True)
class _Stored:
    """The fleet as the state has it."""

    fleet: str
    is_closed: bool = False
    is_running: bool = False
    blobs: str = ""


def check_all(given: Surroundings) -> Iterator[Finding]:
    """Yield the findings, as the checks are made."""
    yield from _check_packages()
    task = yield from _check_task(given.task)
    stored = yield from _check_state(given, task.fleet if task else "")
    if location := given.blobs or stored.blobs:
        yield _check_blobs(location)
    yield from check_disk(given.state)
    yield check_clock()
    yield from _check_keys(given.state)
    if task is not None:
        yield from _check_training(task)
    yield from _check_broker(given, stored)


def _check_task(path: Path | None) -> Generator[Finding, None, TaskFile | None]:
    if path is None:
        yield Finding("task", "skipped", "no task file was given", "give --task")
        return None
    task = None
    try:
        task, backbones = load_task(path)
        for backbone in backbones:
            checked_backbone(backbone)
        yield Finding("task", "ok", f"{path}: fleet {task.fleet}, {task.algorithm}")
    except ProtofleetError as error:
        yield Finding("task", "failed", str(error), "correct it, and run `aggregator check`")
    return task


def _check_state(given: Surroundings, fleet: str) -> Generator[Finding, None, _Stored]:
    stored = _Stored(fleet)
    try:
        if not given.store and not has_database(given.state):
            yield Finding("state", "ok", f"no state in {given.state} yet: the first start creates it")
            return stored
        with contextlib.closing(
            open_store(given.state, read_only=True, database=given.store, fleet=fleet if given.store else "")
        ) as store:
            stored = _stored(store, fleet)
            yield from _check_folder(store)
        where = given.store or given.state
        yield Finding("state", "ok", f"{where}, {'running' if stored.is_running else 'not running'}")
    except NoStateError as error:
        yield Finding("state", "ok", f"the database answers: {error}")
    except ProtofleetError as error:
        action = "see the message" if given.store else "see docs/operations/backup-and-upgrade.md"
        yield Finding("state", "failed", str(error), action)
    return stored


def _stored(store: Store, fleet: str) -> _Stored:
    with contextlib.suppress(ProtofleetError):  # nothing is served yet
        fleet = fleet or store.served_task().fleet
    location = store.facts.get(BlobLocation)
    return _Stored(
        fleet, store.keys.is_closed(), store.database.is_locked(), location.location if location else ""
    )


def _check_folder(store: Store) -> Iterator[Finding]:
    try:
        store.database.check_folder()
    except ProtofleetError as error:
        yield Finding("folder", "failed", str(error), "see docs/operations/standby.md")


def _check_blobs(location: str) -> Finding:
    try:
        next(cluster_module(BLOBS, location).open_blobs(location).digests(), None)
    except ProtofleetError as error:
        return Finding("blobs", "failed", str(error), "see docs/operations/object-store.md")
    return Finding("blobs", "ok", f"{location} can be listed")


def _check_packages() -> Iterator[Finding]:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        action = pip_command("aggregator,cpu")
        yield Finding("packages", "failed", f"not installed: {', '.join(missing)}", action)
        return
    versions = [f"onnx {importlib.metadata.version('onnx')}"]
    if importlib.util.find_spec("torch") is None:
        versions.append("no torch: neither rounds nor FedTC's adapter")
    else:
        versions.append(f"torch {importlib.metadata.version('torch')}")
    yield Finding("packages", "ok", ", ".join(versions))


def _check_training(task: TaskFile) -> Iterator[Finding]:
    """Check the packages that the task's training needs, and the device that it names."""
    if reason := missing_packages(task):
        yield Finding("packages", "failed", reason, INSTALL)
    if not task.training.device.startswith("cuda"):
        return
    if importlib.util.find_spec("torch") is None:
        text = f"training.device is {task.training.device}, and torch is not installed"
        yield Finding("runtime", "warning", text, INSTALL)
        return
    import torch

    if torch.cuda.is_available():
        yield Finding("runtime", "ok", f"CUDA works: {torch.cuda.get_device_name()}")
    else:
        text = f"training.device is {task.training.device}, and PyTorch finds no CUDA device"
        yield Finding("runtime", "failed", text, 'install the driver, or set training.device = "auto"')


def _check_keys(state: Path) -> Iterator[Finding]:
    folder = identity_folder(state)
    file = folder / "signing.key"
    if not file.is_file():
        yield Finding("key", "ok", "no signing key yet: the first start creates it")
    else:
        try:
            key = public_key(read_key(file, advice="restore it from a backup"))
            yield Finding("key", "ok", f"devices pin the key {key.hex()}")
        except ProtofleetError as error:
            yield Finding("key", "failed", str(error), "restore the identity folder from a backup")
    for name in ("ca", "aggregator"):
        if warning := expiry_warning(folder / f"{name}.crt", datetime.now(UTC)):
            yield Finding("key", "warning", warning, "see docs/operations/enrollment.md#renew-certificates")


def _check_broker(given: Surroundings, stored: _Stored) -> Iterator[Finding]:
    fleet, is_closed = stored.fleet, stored.is_closed
    if not fleet:
        yield Finding("broker", "skipped", "the fleet's name is not known", "give --task")
        return
    try:
        access = aggregator_access(given.state, given.access, fleet=fleet, is_closed=is_closed)
    except ProtofleetError as error:
        yield Finding("broker", "failed", str(error), "see the message")
        return
    for broker in addresses_of(given.broker):
        yield from (network := check_network(broker, access))
        if any(each.status == "failed" for each in network):
            continue
        if access.certificate is not None and stored.is_running:
            text = "the aggregator runs, and a login with its certificate would interrupt it"
            yield Finding("login", "skipped", text, "see `aggregator status`, or stop it for this check")
        else:
            yield from _check_login(broker, access, fleet)
        if access.tls:
            yield _check_anonymous(broker, access, is_closed=is_closed)


def _check_login(broker: BrokerAddress, access: BrokerAccess, fleet: str) -> Iterator[Finding]:
    with BrokerProbe(broker, access, subscriptions=device_filters(fleet)) as probe:
        opened = probe.open()
        yield opened
        if opened.status != "ok":
            return
        # No program reads this topic. The aggregator may read none that it may publish on, but its presence's.
        yield probe.check_packets(device_topic(fleet, PROBE_DEVICE, "blk"), comes_back=False)
        yield from probe.check_qos()
        allowed = [fleet_topic(fleet, channel) for channel in get_args(FleetChannel)]
        allowed += [device_topic(fleet, PROBE_DEVICE, "ack"), device_topic(fleet, PROBE_DEVICE, "blk")]
        yield from probe.check_writes(allowed=allowed, denied=(), is_closed=False)


def _check_anonymous(broker: BrokerAddress, access: BrokerAccess, *, is_closed: bool) -> Finding:
    """Check that a broker with TLS refuses a client that has no certificate and no password."""
    anonymous = replace(access, certificate=None, key=None, username=None, password=None)
    with BrokerProbe(broker, anonymous) as probe:
        if probe.open().status != "ok":
            return Finding("anonymous", "ok", "the broker refuses clients without a certificate or password")
    text = "the broker admits clients without a certificate or password"
    action = "use the configuration that `aggregator enroll-broker` writes"
    return Finding("anonymous", "failed" if is_closed else "warning", text, action)
