"""Ray on this machine."""

import contextlib
import tempfile
from collections.abc import Iterator

from benchmarks.cost.engines.processes import AS_OTHERS, environment


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
