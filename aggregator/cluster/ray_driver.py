"""A job on a machine of a Ray cluster. Importing this imports Ray.

This process, the driver, sends the blobs in parts, waits, and writes the files that the job has made. Ray ends the
worker when this process ends.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from aggregator.cluster.ray_actor import JobActor
from aggregator.cluster.ray_connection import connected
from aggregator.cluster.ray_worker import PART_BYTES, Piece, require_whole
from aggregator.storage.blobs import Blobs
from aggregator.training.jobs import BlobJob, Result, Workspace
from protocol import __version__
from protocol.errors import BlobLost, ProtofleetError
from protocol.storage.blobstore import file_digest, state_errors

import ray  # isort: skip - after ray_connection, which sets variables of Ray
from ray.exceptions import RayActorError, RayError  # isort: skip

MAX_LOST_WORKERS = 3
"""Workers that may end without a word during a job; the next one that does ends it."""

POLL_S = 0.5

CPUS = 1
"""Processors that a job reserves."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
"""A worker has these of the driver, as a subprocess would. Ray sets the first one to 1, also on many cores."""


def execute(job: BlobJob, workspace: Workspace) -> Result:
    """Run a job on the cluster; a job whose worker has ended is repeated on another one.

    Raises:
        ProtofleetError: the job cannot be done, or the cluster cannot be used.
    """
    with connected():
        for _ in range(MAX_LOST_WORKERS):
            with contextlib.suppress(RayActorError):
                return _attempt(job, workspace)
            sys.stderr.write("a Ray worker has ended: repeating the job\n")
        return _attempt(job, workspace)


def require_machine(nodes: Iterable[Mapping[str, Any]], *, gpus: int) -> None:
    """Raise ProtofleetError unless one of `ray.nodes()` has what a job reserves; Ray itself would wait for one."""
    machines = [node["Resources"] for node in nodes if node["Alive"]]
    if not any(machine.get("CPU", 0) >= CPUS and machine.get("GPU", 0) >= gpus for machine in machines):
        needed = (
            f"a processor for jobs and {gpus} GPUs (`[training]` gpus)" if gpus else "a processor for jobs"
        )
        raise ProtofleetError(
            f"no machine of the Ray cluster has {needed}: join one with `ray start --address`"
        )


def _attempt(job: BlobJob, workspace: Workspace) -> Result:
    require_machine(ray.nodes(), gpus=job.gpus)
    # Two calls at a time: progress is read while the job runs.
    actor = ray.remote(JobActor).options(num_cpus=CPUS, num_gpus=job.gpus, max_concurrency=2).remote()
    variables = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    ray.get(actor.begin.remote(__version__, variables))
    try:
        return _run(actor, job, workspace)
    finally:
        with contextlib.suppress(RayError):  # the next job of the machine deletes the folder
            ray.get(actor.call.remote("end"))


def _run(actor: Any, job: BlobJob, workspace: Workspace) -> Result:
    lost = dict[bytes, BlobLost]()
    digests = dict.fromkeys(job.blobs(job.manifest(workspace.blobs)))
    for part in parts(workspace.blobs, list(digests), lost):
        ray.get(actor.call.remote("keep", part))  # Ray deletes its copy afterwards
    running = actor.call.remote("run", job)
    while not ray.wait([running], timeout=POLL_S)[0]:
        _report(actor, workspace)
    files: dict[str, bytes]
    result: Result
    try:
        result, files = ray.get(running)
    except BlobLost as error:
        raise lost.get(error.digest, error) from None
    _report(actor, workspace)
    for name, digest in files.items():
        _fetch(actor, name, workspace.folder / name, digest=digest)
    return result


def _report(actor: Any, workspace: Workspace) -> None:
    for figures in ray.get(actor.call.remote("progress")):
        workspace.report(figures)


def _fetch(actor: Any, name: str, path: Path, *, digest: bytes) -> None:
    """Write a file that the worker has made; raises ProtofleetError if it arrives damaged."""
    with state_errors(path), path.open("wb") as file:
        while len(data := ray.get(actor.call.remote("read", name, file.tell()))):
            file.write(data)
    require_whole(name, file_digest(path), digest)


def parts(blobs: Blobs, digests: list[bytes], lost: dict[bytes, BlobLost]) -> Iterator[list[Piece]]:
    """Yield all blobs in parts of at most PART_BYTES; those that are lost are put into `lost`."""
    part, free = list[Piece](), PART_BYTES
    for digest, blob in zip(digests, blobs.read_each(digests), strict=True):
        if isinstance(blob, BlobLost):
            lost[digest] = blob
            continue
        left, is_last = np.frombuffer(blob, np.uint8), False
        while not is_last:
            data, left = left[:free], left[free:]
            is_last = not len(left)
            part.append(Piece(digest, data, is_last))
            free -= len(data)
            if not free:
                yield part
                part, free = [], PART_BYTES
    if part:
        yield part
