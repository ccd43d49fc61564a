"""Fleets with a second operator: their task, their programs, and what each device has masked."""

import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path

import numpy as np

from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import SealKey
from aggregator.sums.stored_lists import sums_of
from edge_client.store.device_state import DeviceState
from protocol.statistics.noisy_sums import released_values
from protocol.statistics.secure_sums import mask_of, open_seed, open_values, submission_context
from protocol.wire.arrays import to_array
from protocol.wire.codec import decode
from protocol.wire.messages import SealedMask, Submission, TaskManifest, Tensors
from protofleet.public_map import public_map
from sums_operator.state import make_task, read_keys
from tests.support.fleets.fleet import Fleet, write_digits, write_task

EACH, SIZE = 10, 12
VALUES = sum(released_values(classes=10, size=SIZE).values())
BUDGET = '[privacy.dp]\nepsilon = 8\nmap = "public.map"\nmax_epsilon = 20\n'
SUMS = '[privacy.sums]\noperator = "{operator}/task.toml"\nmin_devices = {min_devices}\ntolerance = 0.25\n'


def make_operator(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "sums_operator", "init", folder], check=True)
    make_task(folder, folder / "task.toml")


def seal_key_of(folder: Path) -> bytes:
    """Return the private seal key of a second operator's newest task."""
    keys = read_keys(folder)
    key = keys.seal_key(bytes.fromhex(keys.seal_keys()[-1]))
    assert key is not None
    return key


def write_private_task(folder: Path, *, min_devices: int, operator: str = "sums", **settings: object) -> Path:
    """Write a task file and a public map; without a name of the second operator's folder, it has none."""
    tables = BUDGET + (SUMS.format(operator=operator, min_devices=min_devices) if operator else "")
    settings = {"quorum": min_devices, "deadline_s": 3600, "algorithm": "statistics", **settings}
    task = write_task(folder, tables=tables, **settings)  # type: ignore[arg-type]
    public = write_digits(folder / "public", classes=list(range(10)), start=140, each=10)
    made, _ = public_map(public, folder / "backbone-0.onnx", size=SIZE)
    (folder / "public.map").write_bytes(made.to_bytes())
    return task


def start_operator(fleet: Fleet, *options: str | Path, min_devices: int) -> None:
    arguments = ("run", "--state", fleet.root / "sums", "--broker", str(fleet.broker), "--fleet", "default")
    fleet.start("operator", "sums_operator.cli", *arguments, "--min-devices", str(min_devices), *options)


def consent(folder: Path) -> tuple[str, ...]:
    """Return the options with which an owner accepts the second operator of a state folder."""
    card = tomllib.loads((folder / "operator.toml").read_text())
    return "--max-epsilon", "20", "--second-operator", card["sign_key"]


def start_devices(fleet: Fleet, numbers: range) -> None:
    for number in numbers:
        data = write_digits(
            fleet.root / f"data-{number}", classes=list(range(10)), start=EACH * number, each=EACH
        )
        fleet.start_device(f"device-{number}", data, "--once", *consent(fleet.root / "sums"))


def own_sums(fleet: Fleet, name: str, task: bytes) -> np.ndarray:
    """Return the noisy sums that a device has masked, int32: from its outbox, by the keys of both operators."""
    with closing(DeviceState(fleet.device_state(name), read_only=True)) as store:
        item = store.outbox.newest_submission()
        assert item is not None
        assert item.task == task
        payload = store.outbox.payload(item)
        assert payload is not None
    found = decode(payload, Submission, max_bytes=len(payload))
    assert isinstance(found.mask, SealedMask)
    where = submission_context(
        fleet="default", task=task, device=name, sequence=found.sequence, values=VALUES
    )
    seed = open_seed(found.mask, private_key=seal_key_of(fleet.root / "sums"), context=where)
    with closing(open_store(fleet.aggregator_state, read_only=True)) as opened:
        known = opened.facts.get(SealKey)
    assert known is not None
    sealed, private_key = found.tensors["sealed"].data, bytes.fromhex(known.private)
    masked = open_values(sealed, private_key=private_key, context=where)
    return (masked - mask_of(seed, len(masked))).view(np.int32)


def manifest_of(store: Store) -> tuple[bytes, TaskManifest]:
    """Return the digest and the manifest of the task that an aggregator serves."""
    digest = store.served_task().digest
    data = store.blobs.read(digest)
    return digest, decode(data, TaskManifest, max_bytes=len(data))


def opened_total(store: Store) -> np.ndarray:
    """Return the sum of all opened lists of the served task, int32."""
    data = store.blobs.read(bytes.fromhex(sums_of(store.facts, store.served_task().digest).total))
    return to_array(decode(data, Tensors, max_bytes=len(data)).values["total"]).view(np.int32)
