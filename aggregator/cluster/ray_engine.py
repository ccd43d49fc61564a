"""The engine `ray`, which imports Ray where it is used: `aggregator run` only checks it."""

import contextlib
import os
from typing import TYPE_CHECKING

from aggregator.cluster.ray_actor import require_version
from protocol.cli import require_packages
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from aggregator.training.jobs import BlobJob, Result, Workspace

__all__ = ["connected", "execute", "require", "require_version"]


def require() -> None:
    """Raise RuntimeMissing without Ray, and ConfigError without the address of a cluster."""
    require_packages("ray", extras="aggregator,cpu,cluster")
    if not os.environ.get("RAY_ADDRESS"):
        raise ConfigError('engine = "ray" needs a cluster: set RAY_ADDRESS=HOST:PORT')


def execute(job: "BlobJob", workspace: "Workspace") -> "Result":
    """Run a job on the cluster; raises ProtofleetError as `ray_driver.execute` does."""
    from aggregator.cluster import ray_driver

    return ray_driver.execute(job, workspace)


def connected() -> contextlib.AbstractContextManager[None]:
    """Connect this process to the cluster, as `ray_connection.connected` does."""
    from aggregator.cluster import ray_connection

    return ray_connection.connected()
