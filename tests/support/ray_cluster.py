"""Ray on this machine."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock


@contextlib.contextmanager
def workers(number: int) -> Iterator[None]:
    """Connect to a Ray of so many workers; it knows how to import what this process does."""
    import ray

    with tempfile.TemporaryDirectory(
        prefix="pf-", ignore_cleanup_errors=True
    ) as folder:  # sockets: a short path
        ray.init("local", num_cpus=number, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def machines(number: int) -> Iterator[str]:
    """Start a cluster of so many machines with one worker each, all of them here; yield its address."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    with (
        tempfile.TemporaryDirectory(prefix="pf-", ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, RAY_TMPDIR=folder),
    ):
        (Path(folder) / "ray").mkdir()
        cluster = Cluster(initialize_head=True, head_node_args=options)
        try:
            for _ in range(number - 1):
                cluster.add_node(**options)
            cluster.wait_for_nodes()
            yield cluster.address
        finally:
            cluster.shutdown()
