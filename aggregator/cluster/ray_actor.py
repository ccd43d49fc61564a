"""The actor of a job on a machine of a Ray cluster.

This module imports no numpy: OpenBLAS reads OMP_NUM_THREADS when numpy is imported, and Ray has set it to 1.
"""

import os
from collections.abc import Mapping
from typing import Any

from aggregator.cluster.ray_connection import require_version


class JobActor:
    """Has a `ray_worker.Worker` once the variables are set."""

    def begin(self, version: str, variables: Mapping[str, str | None]) -> None:
        """Make the worker; raises ProtofleetError if this machine has another version of protofleet."""
        require_version(version)
        for name, value in variables.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        from aggregator.cluster.ray_worker import Worker

        self._worker = Worker()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker."""
        return getattr(self._worker, method)(*arguments)
