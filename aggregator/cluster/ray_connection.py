"""The connection of this process to a Ray cluster. Importing this imports Ray."""

import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

from protocol.cli import require_packages
from protocol.errors import ProtofleetError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
require_packages("ray", extras="aggregator,cpu,cluster")
import ray  # noqa: E402 - reports its use unless the variable is set before
from ray.exceptions import RayError, RayTaskError  # noqa: E402

CONNECT_S = 10.0


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Connect to the cluster at RAY_ADDRESS, else to one of this machine that ends with the block.

    A process that is connected already stays connected. Of an error in a task, the task's own ProtofleetError is
    raised.

    Raises:
        ProtofleetError: there is no cluster, or it has failed.
    """
    with contextlib.ExitStack() as cleanup:
        try:
            if not ray.is_initialized():
                _connect(cleanup)
            yield
        except RayTaskError as error:
            if isinstance(error.cause, ProtofleetError):
                raise error.cause from None
            raise ProtofleetError(f"Ray: {_last_line(error)}") from error
        except RayError as error:
            raise ProtofleetError(f"Ray: {_last_line(error)}") from error


def _connect(cleanup: contextlib.ExitStack) -> None:
    address, options = os.environ.get("RAY_ADDRESS"), dict[str, Any]()
    if not address:
        folder = cleanup.enter_context(
            tempfile.TemporaryDirectory(prefix="protofleet-", ignore_cleanup_errors=True)
        )
        options = {"include_dashboard": False, "_temp_dir": folder}
    cleanup.callback(ray.shutdown)
    try:
        if address:
            _require_answer(address)
        ray.init(address or "local", logging_level=logging.ERROR, log_to_driver=False, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = (
            f"the Ray cluster at RAY_ADDRESS {address} cannot be used" if address else "Ray does not start"
        )
        raise ProtofleetError(f"{where}: {_last_line(error.__cause__ or error)}") from error


def _require_answer(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT: Ray itself would try for more than ten minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def _last_line(error: BaseException) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), repr(error))
