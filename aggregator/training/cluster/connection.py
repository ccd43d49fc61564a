"""The connection to a Ray cluster; importing this imports Ray."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from protocol import __version__
from protocol.cli import require_packages
from protocol.errors import ProtofleetError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
require_packages("ray", extras="ray")
import ray  # noqa: E402 - reports its use unless the variable is set before
from ray.exceptions import RayError, RayTaskError  # noqa: E402

__all__ = ("connected", "last_line", "ray", "require_version")


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Connect to the cluster at RAY_ADDRESS, else start one of this machine that ends with the block.

    A program that is connected to a cluster already stays so.

    Raises:
        ProtofleetError: there is no cluster, or it has failed; or a task has raised it.
    """
    with contextlib.ExitStack() as cleanup:
        try:
            if not ray.is_initialized():
                _connect(cleanup)
            yield
        except RayTaskError as error:
            if isinstance(error.cause, ProtofleetError):
                raise error.cause from None
            raise ProtofleetError(f"Ray: {last_line(error)}") from error
        except RayError as error:
            raise ProtofleetError(f"Ray: {last_line(error)}") from error


def _connect(cleanup: contextlib.ExitStack) -> None:
    address, options = os.environ.get("RAY_ADDRESS"), dict[str, Any]()
    if not address:
        folder = cleanup.enter_context(
            tempfile.TemporaryDirectory(prefix="protofleet-", ignore_cleanup_errors=True)
        )
        options = {"include_dashboard": False, "_temp_dir": folder}
    cleanup.callback(ray.shutdown)
    try:
        ray.init(address or "local", logging_level=logging.ERROR, log_to_driver=False, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = (
            f"the Ray cluster at RAY_ADDRESS {address} cannot be used" if address else "Ray does not start"
        )
        raise ProtofleetError(f"{where}: {last_line(error)}") from error


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message that is not empty."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), repr(error))


def require_version(version: str) -> None:
    """Raise ProtofleetError in a worker of another version than the aggregator's."""
    if version != __version__:
        raise ProtofleetError(f"a Ray worker has protofleet {__version__}, and the aggregator {version}")
