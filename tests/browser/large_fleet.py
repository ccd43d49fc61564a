"""A fleet of many devices, and what an operator does on its page."""

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggregator.config.schema import TaskFile
from aggregator.coordination.round_state import Entry
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from protocol.wire.messages import Confused, Evaluation
from tests.support.messages.heads import add_head
from tests.support.messages.submissions import TASK, device_info
from tests.unit.aggregator.status.stores import started_store

if TYPE_CHECKING:
    from playwright.sync_api import Page

CLASSES = tuple(f"class {number}" for number in range(20))
HEADS = 10
NOW_S = 1.79e9


def large_store(folder: Path, devices: int) -> Store:
    """Return an open store of a fleet whose devices have few of the classes each; each has evaluated every head."""
    chance = random.Random(0)
    file = TaskFile(classes=CLASSES, backbones=("b.onnx",), fleet="orchard", quorum=20, deadline_s=600.0)
    store = started_store(folder, file)
    names = [f"shed-{number:04}" for number in range(devices)]
    with store.transaction():
        for name in names:
            add_device(store, name, chance)
        for version in range(1, HEADS + 1):
            digest = store.blobs.put(f"head {version}".encode())
            made: dict[str, Any] = {
                "digest": digest,
                "size_bytes": 99,
                "trained_s": NOW_S + version,
                "file": digest,
            }
            members, metrics = dict.fromkeys(names, b"a"), {"loss": 1 / version}
            add_head(store, version, members=members, prototypes=10, metrics=metrics, **made)
            for name in names:
                put_evaluation(store, name, version, chance)
        for name in names[:100]:
            store.refusals.count(name, reason="signature", detail="invalid", now_s=NOW_S)
        for name in names[:8]:
            store.quarantine.add(TASK, name, reason="its prototypes are far from the others'", now_s=NOW_S)
    return store


def add_device(store: Store, name: str, chance: random.Random) -> None:
    """Store a device that is online, and its submission."""
    labels = sorted(chance.sample(range(len(CLASSES)), 6))
    store.devices.put_presence(name, chance.choice(("online", "online", "online", "offline")), now_s=NOW_S)
    images = {CLASSES[label]: chance.randrange(1, 400) for label in labels}
    info = device_info(
        runtime="CPU", software="0.1.0", images=images, head_version=HEADS, backbones=(bytes(32),)
    )
    store.devices.put_info(name, info, now_s=NOW_S)
    per_class = {label: images[CLASSES[label]] // 5 + 1 for label in labels}
    entry = Entry(1, name.encode(), 100.0, 0)
    total = sum(per_class.values())
    store.submissions.put(TASK, SubmissionRecord(name, entry, 16 * total, 5 * total, total, per_class))


def put_evaluation(store: Store, name: str, version: int, chance: random.Random) -> None:
    """Store a device's evaluation of a head; later heads are better."""
    total = [chance.randrange(1, 9) if chance.random() < 0.3 else 0 for _ in CLASSES]
    correct = [sum(chance.random() < 0.5 + 0.04 * version for _ in range(count)) for count in total]
    incorrect = [count - found for count, found in zip(total, correct, strict=True)]
    confused = tuple(Confused(label, (label + 1) % len(CLASSES), n) for label, n in enumerate(incorrect) if n)
    evaluation = Evaluation(
        task=TASK,
        head_version=version,
        correct=tuple(correct),
        incorrect=tuple(incorrect),
        confused=confused,
    )
    store.evaluations.put(name, evaluation, digest=f"{name} {version}".encode(), now_s=NOW_S)


def operate(page: "Page") -> None:
    """Do what an operator does on the page."""
    page.get_by_role("button", name="Accuracy").click()
    page.get_by_role("button", name="Next").click()
    page.get_by_label("Filter").fill("shed-09")
    page.get_by_text("100 devices", exact=True).wait_for()
    page.get_by_label("Show").select_option("prototypes")
    for _ in range(10):
        page.mouse.wheel(0, 400)
    page.wait_for_timeout(200)
