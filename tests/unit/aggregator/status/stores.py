"""State folders of aggregators, and the status that is shown of them."""

import io
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from rich.console import Console

from aggregator.config.privacy import PrivacyBudget, PrivacySettings, SumsSettings
from aggregator.config.schema import TaskFile
from aggregator.coordination.round_state import Entry
from aggregator.status import model
from aggregator.status.collect import collect_status
from aggregator.status.render import render_status
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import ServedTask, SigningKey
from aggregator.storage.submissions import SubmissionRecord
from aggregator.sums.stored_lists import PendingList, SumLists, put_sums
from protocol.wire.messages import BlobRef, SecondOperator
from tests.support.messages import heads
from tests.support.messages.submissions import TASK, device_info, evaluation
from tests.support.simulation.clocks import FakeClock

TASK_FILE = TaskFile(
    classes=("cat", "dog [/bold]", "fox"), backbones=("b.onnx",), fleet="barn", quorum=2, deadline_s=60.0
)


def submission_row(
    device: str, per_class: dict[int, int], received_s: float = 100.0, *, number: int = 0
) -> SubmissionRecord:
    entry = Entry(1, device.encode(), received_s, number)
    return SubmissionRecord(device, entry, 1000, 50, sum(per_class.values()), per_class)


def add_head(store: Store, version: int, *, tensors: BlobRef | None = None, **members: str) -> None:
    digest = store.blobs.put(b"head")
    made: dict[str, Any] = {
        "digest": digest,
        "size_bytes": 99,
        "trained_s": 50.0,
        "prototypes": 10,
        "file": digest,
    }
    covered = {device: bytes.fromhex(each) for device, each in members.items()} or {"a": b"a"}
    heads.add_head(store, version, members=covered, metrics={"loss": 0.5}, tensors=tensors, **made)


def started_store(folder: Path, task: TaskFile = TASK_FILE) -> Store:
    store = open_store(folder, lock=True)
    store.clock = FakeClock(1e6)
    served = (TASK, 1, task.fleet, task.algorithm, task.classes)
    put = ServedTask(*served, task.settings, task.rollout, task.limits, is_personal=task.is_personal)
    store.facts.put(put)
    return store


def busy_store(folder: Path) -> Store:
    store = started_store(folder)
    store.devices.put_presence("a", "online", now_s=10.0)
    store.devices.put_info("a", device_info(runtime="CPU", images={"cat": 30, "fox": 20}), now_s=11.0)
    store.devices.put_presence("idle", "offline", now_s=12.0)
    store.submissions.put(TASK, submission_row("a", {0: 6, 2: 4}))
    add_head(store, 1)
    store.evaluations.put("a", evaluation(), digest=b"e", now_s=60.0)
    store.submissions.put(TASK, submission_row("b", {0: 3}, received_s=200.0))
    store.refusals.count("c", reason="shape", detail="expected [16], got [17]", now_s=1.0)
    return store


def private_store(folder: Path) -> Store:
    """Return the store of a task with a second operator: one list is opened, one requested, and a device waits."""
    store = started_store(folder, TASK_FILE)
    budget = PrivacyBudget(epsilon=2.0, map="public.map", max_epsilon=4.0)
    sums = SumsSettings(operator="operator.toml", min_devices=2, tolerance=0.25)
    keys = {"seal_key": b"a" * 32, "sign_key": b"b" * 32, "aggregator_key": b"c" * 32}
    operator = SecondOperator(**keys, seal_key_signature=bytes(64), min_devices=2, honest=1)
    privacy = PrivacySettings(dp=budget, sums=sums)
    store.facts.put(replace(store.served_task(), privacy=privacy, second_operator=operator))
    store.facts.put(SigningKey("c" * 64))
    for device, spent in zip("abcdefg", (2.0, 3.6, 2.0, 2.0, 2.0, 2.0, 2.0), strict=True):
        store.submissions.put(TASK, submission_row(device, {0: 1}))
        store.keys.pin(device, bytes(32), now_s=1.0)
        store.devices.raise_epsilon(device, spent)
    pending = PendingList({"e": "00", "f": "00"}, request="00", requested_s=1e6, masked="00")
    put_sums(
        store.facts, SumLists(TASK, 1, tuple("abcd"), summed=2, pending=pending, problem="a device has lied")
    )
    return store


def collected(store: Store) -> model.Status:
    """Return the status after a round trip through its JSON."""
    status = collect_status(store)
    assert msgspec.json.decode(msgspec.json.encode(status), type=model.Status) == status
    return status


def rendered(status: model.Status, *, width: int = 200) -> str:
    text = io.StringIO()
    render_status(status, Console(file=text, width=width))
    return text.getvalue()
