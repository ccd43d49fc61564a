"""A program that is killed in the middle of its work: `python -m tests.support.fleets.killed_program MODULE ...`.

An environment variable, `MODULE:FUNCTION:before` or `...:after`, names a function of the program: the process is killed
by SIGKILL before its first call does anything, or as soon as it has returned.
"""

import importlib
import os
import signal
import sys
from functools import reduce
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, NoReturn

from aggregator import supervisor
from aggregator.job_processes import JobRunner
from aggregator.server import program as serve
from tests.support.fleets.fleet import Fleet

KILLED_AT = "PROTOFLEET_TEST_KILLED_AT"


def run_until_killed(fleet: Fleet, name: str, point: str, *program: str | Path) -> None:
    """Start a program that is killed at a point, and wait until it is."""
    start_killed(fleet, name, point, *program)
    fleet.wait_exit(name, -signal.SIGKILL)


def start_killed(fleet: Fleet, name: str, point: str, *program: str | Path) -> None:
    fleet.start(name, __name__, *program, environment={KILLED_AT: point})


def _run_serve(of: supervisor.Supervisor) -> NoReturn:
    settings: Any = of._all[-1].program.settings
    # Without a supervisor, its jobs are its own children.
    setattr(serve, "SupervisedJobs", lambda _, on_event: JobRunner(on_event))  # noqa: B010 - as below
    serve.run(settings, Pipe()[0])
    sys.exit()


def main() -> None:
    """Run the program that the first argument names."""
    module, name, when = os.environ.pop(KILLED_AT).split(":")
    *owners, last = name.split(".")
    owner = reduce(getattr, owners, importlib.import_module(module))
    function = getattr(owner, last)

    def killed(*arguments: Any, **named: Any) -> None:
        if when == "after":
            function(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, last, killed)
    del sys.argv[0]
    # The program `serve` runs in this process, where the function is replaced.
    setattr(supervisor.Supervisor, "run", _run_serve)  # noqa: B010 - mypy refuses the assignment
    importlib.import_module(sys.argv[0]).main()


if __name__ == "__main__":
    main()
