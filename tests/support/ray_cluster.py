"""A Ray cluster whose machines are all here."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

AS_OTHERS = {"RAY_worker_niceness": "0"}
"""Ray's workers have niceness 15 by default: beside other programs on the same machine they would wait for these."""

START_S = 240.0
"""Time for the start of a simulated machine: Ray's own 30 seconds are too few on a busy one."""

OBJECT_STORE_BYTES = 200 * 2**20
"""Memory of each simulated machine's object store: more than the parts that are on their way."""


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set variables and restore them, and no others: Ray sets some of its own, which it needs for the next cluster."""
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def _patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Return Ray's query for a machine, which waits for one that is starting."""

    def get(*arguments: Any) -> Any:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(0.1)

    return get


@contextlib.contextmanager
def machines(number: int) -> Iterator[Path]:
    """Start a cluster of so many machines with one processor each, beside one without, to which RAY_ADDRESS leads.

    Yields the folder of their temporary files.
    """
    from ray._private import services
    from ray.cluster_utils import Cluster

    options = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    with (
        # A short path, for sockets.
        tempfile.TemporaryDirectory(prefix="pf-", ignore_cleanup_errors=True) as folder,
        environment(RAY_TMPDIR=folder, TMPDIR=f"{folder}/files", **AS_OTHERS),
        patch.object(services, "get_node", _patient(services.get_node)),
    ):
        for name in ("ray", "files"):
            (Path(folder) / name).mkdir()
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
        try:
            for _ in range(number):
                cluster.add_node(num_cpus=1, **options)
            cluster.wait_for_nodes(START_S)
            with environment(RAY_ADDRESS=str(cluster.address)):
                yield Path(folder) / "files"
        finally:
            cluster.shutdown()
