"""A Ray cluster whose machines are all here."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

AS_OTHERS = {"RAY_worker_niceness": "0"}
"""Ray's workers have niceness 15 by default: beside other programs on the same machine they would wait for these."""

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


@contextlib.contextmanager
def machines(number: int) -> Iterator[Path]:
    """Start a cluster of so many machines with one processor each, beside one without, to which RAY_ADDRESS leads.

    Yields the folder of their temporary files.
    """
    from ray.cluster_utils import Cluster

    options = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    with (
        # A short path, for sockets.
        tempfile.TemporaryDirectory(prefix="pf-", ignore_cleanup_errors=True) as folder,
        environment(RAY_TMPDIR=folder, TMPDIR=f"{folder}/files", **AS_OTHERS),
    ):
        for name in ("ray", "files"):
            (Path(folder) / name).mkdir()
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
        try:
            for _ in range(number):
                cluster.add_node(num_cpus=1, **options)
            cluster.wait_for_nodes()
            with environment(RAY_ADDRESS=str(cluster.address)):
                yield Path(folder) / "files"
        finally:
            cluster.shutdown()
