"""The order of events: a cluster whose programs are killed, and one process with the same submissions."""

import contextlib
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

from aggregator.storage.open_store import open_store
from examples.cluster.cluster import (
    CONNECTED,
    COORDINATORS,
    PROXY,
    RECEIVERS,
    Cluster,
    Service,
    copy_keys,
    role_state,
)
from examples.quickstart.folder import FLEET, Folder
from protocol.errors import ProtofleetError
from tests.support.databases.postgresql import PostgreSQL
from tests.support.fleets.fleet import Fleet
from tests.support.network.brokers import free_address
from tests.support.network.nats import NatsCluster
from tests.support.stores.object_store import BUCKET, moto_server

FAULTS = {
    "broker": "nats-0",
    "receiver": RECEIVERS[0],
    "coordinator": "",  # the one that leads
    "database": "postgresql",
    "object-store": PROXY,
    "trainer": "",  # the one that has claimed the job
}
"""Kinds of programs that are killed, in this order, and the name of the program."""
SINGLE = "single-process"
RESTART_S = 3.0
"""Seconds after which a killed program is started again, as by a service manager."""
ROW = "{:>8}  {:15}{:>8}{:>13}{:>12}{:>13}"


@dataclass(frozen=True)
class Head:
    """The sha256 of head.onnx, and the digest of each device's submission that the head was trained on."""

    digest: str
    submissions: dict[str, str]


def run_cluster(
    folder: Folder, names: Sequence[str], faults: Collection[str]
) -> tuple[Head, dict[str, str], Counter[str]]:
    """Start the devices in groups, and kill a program while each group uploads; the last one completes the quorum.

    Returns the head, the digest of each device's acknowledged submission, and how often each was accepted.

    Raises:
        ProtofleetError: a program ended by itself, or the training was over too soon.
    """
    print("starting PostgreSQL, an object store, NATS and two of each role\n", flush=True)
    upload_faults = [each for each in FAULTS if each in faults and each != "trainer"]
    groups = [names[number :: len(upload_faults) + 1] for number in range(len(upload_faults) + 1)]
    with _running_cluster(folder) as cluster:
        print(ROW.format("at", "killed", "waiting", "next after", "all after", "new leader"), flush=True)
        for fault, group in zip(upload_faults, groups, strict=False):
            cluster.start_devices(group)
            cluster.wait_until("a submission", partial(cluster.building, group))
            _kill(cluster, fault, group, done=cluster.submissions)
        cluster.start_devices(groups[-1])
        if "trainer" in faults:
            cluster.wait_until("a training", lambda: cluster.trainer_at_work() or cluster.with_head())
            _kill(cluster, "trainer", names, done=cluster.with_head)
        cluster.wait_until("the head on all devices", lambda: cluster.with_head() == set(names))
        head = read_head(role_state(folder, cluster.leader() or COORDINATORS[0]))
        return head, cluster.submissions(), cluster.accepted()


def _kill(cluster: Cluster, fault: str, names: Sequence[str], *, done: Callable[[], Collection[str]]) -> None:
    """Kill a program, wait until it runs again and all these devices are done, and print how long that took."""
    target = FAULTS[fault] or (cluster.leader() if fault == "coordinator" else cluster.trainer_at_work())
    if not target:
        raise ProtofleetError("the training was over before its trainer could be killed: run it again")
    kill, start = cluster.services.get(target, (partial(cluster.kill, target), partial(cluster.run, target)))
    at, kill_s, before, reached_s = time.strftime("%X"), time.monotonic(), set(done()), dict[str, float]()
    kill()

    def start_later() -> None:
        time.sleep(RESTART_S)
        start()

    def is_over() -> bool:
        now = set(done())
        marks = {"next": now > before, "all": now.issuperset(names), "leader": bool(cluster.leader())}
        for mark in filter(marks.get, marks):
            reached_s.setdefault(mark, time.monotonic() - kill_s)
        return {"all", "leader"} <= reached_s.keys() and restarted.done()

    with ThreadPoolExecutor(1) as pool:
        restarted = pool.submit(start_later)
        cluster.wait_until(f"the fleet after {target} was killed", is_over)
        restarted.result()
    next_s, all_s, leader_s = (f"{reached_s.get(mark, 0):.1f} s" for mark in ("next", "all", "leader"))
    new_leader = leader_s if fault == "coordinator" else ""
    print(ROW.format(at, target, len(set(names) - before), next_s, all_s, new_leader), flush=True)


@contextlib.contextmanager
def _running_cluster(folder: Folder) -> Iterator[Cluster]:
    proxy, logs, database = free_address(), folder.root / "services", PostgreSQL()
    environment = {
        "PROTOFLEET_STORE": database.url,
        "PROTOFLEET_BLOBS": f"s3://{BUCKET}/cluster",
        "PROTOFLEET_FLEET": FLEET,
        "AWS_ENDPOINT_URL": f"http://{proxy}",
        "AWS_ACCESS_KEY_ID": "example",
        "AWS_SECRET_ACCESS_KEY": "example",
        "AWS_REGION": "us-east-1",
    }
    with (
        mock.patch.dict(os.environ, environment),
        contextlib.closing(database),
        moto_server(logs) as moto,
        NatsCluster(logs) as nats,
    ):
        database.start()
        services: dict[str, Service] = {
            "nats-0": (partial(nats.kill, 0), partial(nats.start, 0)),
            "postgresql": (database.kill, database.start),
        }
        with Cluster(folder, nats.brokers, services=services, ports=(proxy.port, moto.port)) as cluster:
            cluster.run_all()
            yield cluster


def read_head(state: Path) -> Head:
    """Read the newest head of an aggregator, by its state folder; raises StateError if it cannot be read."""
    with contextlib.closing(open_store(state, read_only=True)) as store:
        head = store.heads.all(store.served_task().digest)[-1]
    content = (state / "head.onnx").read_bytes()
    return Head(hashlib.sha256(content).hexdigest(), {**head.members, **head.quarantined})


def run_single(folder: Folder, names: Sequence[str]) -> Head:
    """Train the head in one process, with SQLite and a folder, on the submissions that the devices have.

    The process has the cluster's keys but none of its submissions, which the devices therefore send once more.
    """
    print("\na single process trains on the same submissions\n", flush=True)
    (logs := folder.logs / SINGLE).mkdir()
    copy_keys(folder, SINGLE)
    with Fleet(logs, free_address()) as fleet:
        fleet.aggregator_state = role_state(folder, SINGLE)
        fleet.start_aggregator(folder.task, "--embedded-broker")
        fleet.wait_for_log("aggregator", CONNECTED)
        for name in names:
            fleet.start_device(name, folder.images(name), "--fleet", FLEET, state=folder.state(name))
        fleet.wait_for_log("aggregator", "head activated")
        return read_head(fleet.aggregator_state)


def problems(head: Head, single: Head, *, submitted: dict[str, str], accepted: Counter[str]) -> list[str]:
    """Return acknowledged submissions that do not count once, and that a single process makes another head."""
    members = head.submissions
    devices = sorted(members.keys() | submitted.keys())
    lost = [f"LOST: {name}" for name in devices if members.get(name) != submitted.get(name)]
    twice = [f"COUNTED TWICE: {name}" for name, times in sorted(accepted.items()) if times > 1]
    return [*lost, *twice, *(["OTHER HEAD"] if head != single else [])]
