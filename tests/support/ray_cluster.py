"""Ray on this machine."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

AS_OTHERS = {"RAY_worker_niceness": "0"}
"""Ray's workers have niceness 15 by default: beside other programs on the same machine they would wait for these."""

OBJECT_STORE_BYTES = 200 * 2**20
"""Memory of each simulated machine's object store: more than the chunks that are on their way."""


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


@contextlib.contextmanager
def workers(number: int) -> Iterator[None]:
    """Connect to a Ray of so many workers; it knows how to import what this process does."""
    import ray

    with (
        # A short path, for sockets.
        tempfile.TemporaryDirectory(prefix="pf-", ignore_cleanup_errors=True) as folder,
        environment(**AS_OTHERS),
    ):
        ray.init("local", num_cpus=number, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def machines(number: int) -> Iterator[str]:
    """Start a cluster of so many machines with one worker each, all of them here; yield RAY_ADDRESS."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    with (
        # A short path, for sockets.
        tempfile.TemporaryDirectory(prefix="pf-", ignore_cleanup_errors=True) as folder,
        environment(RAY_TMPDIR=folder, **AS_OTHERS),
    ):
        (Path(folder) / "ray").mkdir()
        cluster = Cluster(initialize_head=True, head_node_args=options)
        try:
            for _ in range(number - 1):
                cluster.add_node(**options)
            cluster.wait_for_nodes()
            yield str(cluster.address)
        finally:
            cluster.shutdown()
