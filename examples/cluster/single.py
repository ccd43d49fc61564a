"""The head of an aggregator, and one process that trains it on the submissions of a cluster."""

import contextlib
import hashlib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aggregator.storage.open_store import open_store
from aggregator.storage.stored_values import ServedTask
from examples.cluster.devices import Devices
from examples.cluster.processes import Processes, Program, free_port
from examples.quickstart.folder import Folder
from protocol.errors import StateError

SINGLE = "single-process"


@dataclass(frozen=True)
class Trained:
    """A fleet's head.

    Attributes:
        digest: sha256 of head.onnx.
        submissions: the digest of each device's submission that the head was trained on.
    """

    digest: str
    submissions: dict[str, str]


def trained_head(state: Path) -> Trained:
    """Read the newest head of an aggregator, by its state folder.

    Raises:
        StateError: it cannot be read, or there is none.
    """
    with contextlib.closing(open_store(state, read_only=True)) as store:
        served = store.facts.get(ServedTask)
        heads = store.heads.all(served.digest) if served else []
        if not heads:
            raise StateError(f"no head in {state}")
    content = (state / "head.onnx").read_bytes()
    return Trained(hashlib.sha256(content).hexdigest(), {**heads[-1].members, **heads[-1].quarantined})


def run_single(folder: Folder, names: Sequence[str], keys: Path, *, deadline_s: float) -> Trained:
    """Train the head in one process, with SQLite and a folder, on the submissions that the devices have.

    The devices run again with their states. The process has the keys of the cluster but none of its submissions, which
    the devices therefore send once more, with the same bytes.
    """
    address, state = f"127.0.0.1:{free_port()}", folder.root / "roles" / SINGLE
    state.mkdir(mode=0o700)
    shutil.copytree(keys, state / "identity", ignore=shutil.ignore_patterns("lock"))
    with Processes(folder.logs, deadline_s=deadline_s) as processes:
        processes.start(
            Program(
                name=SINGLE,
                role="",
                command=(
                    *(
                        sys.executable,
                        "-m",
                        "aggregator.cli",
                        "run",
                        "--embedded-broker",
                        "--broker",
                        address,
                    ),
                    *("--task", str(folder.task), "--state", str(state), "--http", "off"),
                ),
                environment={"OMP_NUM_THREADS": "1"},
                ready="connected to the broker",
            )
        )
        processes.wait_until(lambda: processes.states[SINGLE] == "running")
        devices = Devices(folder, folder.logs / SINGLE, processes)
        devices.start(names, [address])
        processes.wait_until(lambda: "head activated" in processes.log(SINGLE))
    return trained_head(state)
