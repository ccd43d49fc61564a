"""`aggregator train`."""

import os
import socket
from pathlib import Path

import click

from aggregator.cli.state import (
    EXTRAS,
    checked_name,
    existing_state,
    fleet_option,
    state_option,
    store_option,
)
from protocol.cli import (
    config_option,
    examples,
    require_packages,
    setting,
    start_logging,
    verbose_option,
)
from protocol.service_manager import stop_on_terminate


@click.command(
    "train",
    epilog=examples(
        "aggregator train --name gpu-1",
        "aggregator train --state /srv/worker --store postgresql://protofleet@db.example/fleets --fleet barn",
    ),
)
@config_option
@state_option
@store_option(
    "PostgreSQL database of an aggregator on another machine, whose blobs are in an object store: --state is then this "
    "worker's own, and remembers it. The password: PGPASSWORD or ~/.pgpass."
)
@fleet_option
@setting(
    "--name",
    envvar="PROTOFLEET_WORKER",
    callback=checked_name(lambda: f"{socket.gethostname()}-{os.getpid()}"),
    help="Unique name of this worker.  [default: host name and process id]",
)
@setting(
    "--lease-s",
    type=click.FloatRange(min=1),
    default=30.0,
    help="Seconds after which another worker may claim the job of this one, if this one has stopped answering.",
)
@verbose_option
def train_command(
    *, state: Path, database: str, fleet: str, name: str, lease_s: float, verbose: bool
) -> None:
    """Train heads for an `aggregator run --external-training` until interrupted."""
    start_logging(verbose=verbose)
    require_packages("onnx", "onnxscript", "onnxruntime", "scipy", "torch", extras=EXTRAS)
    from aggregator.service.standby import until_answered
    from aggregator.training.workers.worker import Worker, scratch_folder

    stop_on_terminate()

    def run() -> None:
        opened = existing_state(state, database=database, fleet=fleet)
        with opened as store, scratch_folder(state, name) as folder:
            Worker(store, folder, name=name, lease_s=lease_s).run()

    until_answered(run)
