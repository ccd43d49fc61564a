"""Checks of a device's state directory, its images and ONNX Runtime."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import disk_usage

from edge_client.core.state import StoredState
from edge_client.graphs.session import require_runtime
from edge_client.images.images import LabeledImage, name_some, scan_images
from edge_client.store.device_state import DeviceState
from edge_client.store.disk_space import MAX_RESERVE_BYTES, RESERVE_SHARE
from protocol.cli import counted
from protocol.doctor.findings import Finding
from protocol.doctor.machine import check_disk
from protocol.errors import MalformedMessage, ProtofleetError, RuntimeMissing, pip_command
from protocol.wire.codec import decode as decode_message
from protocol.wire.messages import MAX_MANIFEST_BYTES, TaskManifest


def check_state(folder: Path, store: DeviceState | None) -> Iterator[Finding]:
    """Check the state directory and its disk, with the reserve that the program leaves."""
    if store is None:
        text = f"no device state in {folder} yet: the first start of edge-client creates it"
        yield Finding("state", "ok", text)
    else:
        yield Finding("state", "ok", f"{folder}, {'running' if store.is_locked() else 'not running'}")
    place = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
    reserve = min(int(disk_usage(place).total * RESERVE_SHARE), MAX_RESERVE_BYTES)
    yield from check_disk(folder, reserve_bytes=reserve)


def stored_task(store: DeviceState | None) -> TaskManifest | None:
    """Return the task that the device works on; None if there is none."""
    try:
        digest = store.get(StoredState).task if store is not None else b""
        if store is None or not digest:
            return None
        return decode_message(store.blobs.read(digest), TaskManifest, max_bytes=MAX_MANIFEST_BYTES)
    except (ProtofleetError, MalformedMessage):
        return None


def check_runtime() -> Finding:
    """Check that ONNX Runtime can be loaded."""
    try:
        runtime = require_runtime()
    except RuntimeMissing as error:
        return Finding("runtime", "failed", str(error), f"{pip_command('cpu')}, or [gpu]")
    available = (name.removesuffix("ExecutionProvider").lower() for name in runtime.get_available_providers())
    names = [name for name in available if name != "azure"]  # a remote service, in every wheel
    return Finding("runtime", "ok", f"ONNX Runtime {runtime.__version__}: {', '.join(names)}")


def check_images(data: Path, task: TaskManifest | None) -> Iterator[Finding]:
    """Check the images against the task's classes."""
    if not data.exists():
        action = "give --data; an empty folder, to receive heads only"
        yield Finding("images", "failed", f"no images at {data}", action)
        return
    if task is None:
        text = f"{data} exists; its classes cannot be compared without a task"
        yield Finding("images", "skipped", text, "run edge-client until it has the fleet's task")
        return
    try:
        scan = scan_images(data, task.classes)
    except ProtofleetError as error:
        yield Finding("images", "failed", str(error), "correct --data, or the list")
        return
    yield from _check_classes(scan.images, task)
    if scan.unknown:
        text = f"{name_some(scan.unknown)}: no class of the task"
        yield Finding("images", "warning", text, "rename them, or add the classes to the task file")
    if scan.skipped:
        text = ", ".join(f"{counted(files, 'file')}: {reason}" for reason, files in scan.skipped.items())
        yield Finding("images", "warning", f"skipped {text}", "convert or move them if they are images")


def _check_classes(images: Sequence[LabeledImage], task: TaskManifest) -> Iterator[Finding]:
    counts = Counter(image.label for image in images)
    if not counts:
        yield Finding(
            "images", "warning", "no image of the task's classes: the device uploads nothing, and receives heads",
            f"expected folders named {name_some(task.classes)}",
        )  # fmt: skip
        return
    yield Finding(
        "images", "ok", f"{counted(len(images), 'image')} of {len(counts)} of {len(task.classes)} classes"
    )
    few = [task.classes[label] for label, number in counts.items() if number < task.min_images]
    if few:
        text = f"too few images of {name_some(few)}: at least {task.min_images} are needed"
        yield Finding("images", "warning", text, "add images")
