"""`aggregator receive` and `aggregator train`: the programs beside the one that coordinates a fleet."""

import os
import socket
from pathlib import Path
from typing import Any

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
    access_options,
    config_option,
    examples,
    read_access,
    require_packages,
    setting,
    start_logging,
    verbose_option,
)
from protocol.errors import ConfigError
from protocol.service_manager import stop_on_terminate


def _parsed_shards(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> frozenset[int] | None:
    """Return the shards of a list of numbers and ranges; None if there is none."""
    from protocol.wire.topics import SHARDS

    if not text:
        return None
    found = set[int]()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise click.BadParameter(f"expected numbers and ranges such as 0-31,40, got {text!r}")
        found |= set(range(int(first), int(last or first) + 1))
    if not found or max(found) >= SHARDS:
        raise click.BadParameter(f"expected shards from 0 to {SHARDS - 1}, got {text!r}")
    return frozenset(found)


@click.command(
    "receive",
    epilog=examples(
        "aggregator receive --state /srv/receiver --store postgresql://protofleet@db.example/fleets --fleet barn "
        "--broker broker.example --tls",
    ),
)
@config_option
@state_option
@store_option(
    "PostgreSQL database of an aggregator on another machine, whose blobs are in an object store: --state is then this "
    "receiver's own, and remembers it. The password: PGPASSWORD or ~/.pgpass."
)
@fleet_option
@setting(
    "--name",
    envvar="PROTOFLEET_RECEIVER",
    callback=checked_name(socket.gethostname),
    help="Unique name of this receiver, which continues unfinished uploads after a restart.  [default: host name]",
)
@setting(
    "--shards",
    metavar="LIST",
    callback=_parsed_shards,
    help="Shards of uploads to receive, of 0 to 63, such as 0-31.  [default: all receivers divide them]",
)
@setting(
    "--broker",
    default="127.0.0.1",
    metavar="HOST[:PORT][,...]",
    help="MQTT broker to connect to (several are tried in turn).",
)
@access_options
@verbose_option
def receive_command(
    *,
    state: Path,
    database: str,
    fleet: str,
    name: str,
    shards: frozenset[int] | None,
    broker: str,
    verbose: bool,
    **access_given: Any,
) -> None:
    """Receive uploads for an `aggregator coordinate` until interrupted."""
    start_logging(verbose=verbose)
    require_packages("numpy", extras=EXTRAS)
    from aggregator.security.identity import aggregator_access, has_ca
    from aggregator.service.receiving.upload_receiver import receive, receiver_folder
    from aggregator.service.standby import until_answered
    from aggregator.storage.stored_values import ServedTask
    from protocol.mqtt.tls import parse_brokers

    access = read_access(**access_given)
    if access.tls and access.certificate is None and access.username is None and has_ca(state):
        raise ConfigError(
            "a receiver of a closed fleet needs a certificate of its own, as the broker has one connection for each: "
            f"`aggregator enroll-receiver {name}`, then --ca, --cert and --key"
        )
    brokers = parse_brokers(broker, tls=access.tls)
    stop_on_terminate()

    def run() -> None:
        opened = existing_state(state, database=database, fleet=fleet)
        with opened as store, receiver_folder(state, name) as folder:
            served = store.facts.get(ServedTask)
            own = aggregator_access(state, access, fleet=fleet if served is None else served.fleet)
            receive(store, folder=folder, name=name, fixed=shards, broker=brokers, access=own)

    until_answered(run)


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
