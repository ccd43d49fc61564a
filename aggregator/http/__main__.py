"""The HTTP server's process, a program of `aggregator run`."""

import contextlib
import os
from multiprocessing.connection import Connection

from aggregator.http.settings import HttpSettings
from aggregator.supervised import run_program
from protocol.service_manager import ServiceManager

NICENESS = 5
"""Below the aggregator's intake, where the processor is busy."""


def run(settings: HttpSettings, pipe: Connection) -> None:
    """Serve until SIGTERM."""
    ServiceManager().ready()  # the socket listens
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(NICENESS)
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    from aggregator.http.server import serve

    serve(settings, pipe)


if __name__ == "__main__":
    run_program(HttpSettings, run)
