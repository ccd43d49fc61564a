"""A process of simulated devices: begins when a line arrives on stdin, and ends when stdin is closed.

It prints its progress as a line of JSON, and what each device has once all are done.
"""

import json
import selectors
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from benchmarks.fleet.load.device import SimulatedDevice
from benchmarks.fleet.load.sessions import Loop
from protocol.mqtt.tls import BrokerAddress

REPORT_S = 0.5


@dataclass(frozen=True)
class Progress:
    """Numbers of devices, and times by `time.monotonic`, which all processes share; 0 until then."""

    connected: int
    received: int
    """Devices whose submission the aggregator has received."""
    heads: int
    """Devices that have the head."""
    done: int
    """Devices whose evaluation the aggregator has received."""
    attempts: int
    """Connections that were opened or refused so far."""
    frames: int
    """Frames of submissions and queries that were sent so far."""
    receipts: int
    """Receipts of submissions so far."""
    received_s: float
    """When the last submission was received."""
    head_s: float
    """When the first device had the head."""
    done_s: float
    """When the last evaluation was received."""


def progress_of(devices: Sequence[SimulatedDevice]) -> Progress:
    """Return the progress of devices."""
    received = [each.received_s for each in devices if each.received_s]
    heads = [each.head_s for each in devices if each.head_s]
    done = [each.evaluated_s for each in devices if each.evaluated_s]
    return Progress(
        connected=sum(each.session.is_connected for each in devices),
        received=len(received),
        heads=len(heads),
        done=len(done),
        attempts=sum(each.session.attempts for each in devices),
        frames=sum(each.frames for each in devices),
        receipts=sum(each.receipts for each in devices),
        received_s=max(received, default=0.0),
        head_s=min(heads, default=0.0),
        done_s=max(done, default=0.0),
    )


def report(devices: Sequence[SimulatedDevice], loop: Loop) -> None:
    """Print the progress, with the digests of submission and head once all devices are done, and again later."""
    progress = progress_of(devices)
    line: dict[str, Any] = asdict(progress)
    if progress.done == len(devices):
        line["devices"] = {each.name: (each.submission.hex(), each.head.hex()) for each in devices}
    print(json.dumps(line), flush=True)
    if progress.done < len(devices):
        loop.after(REPORT_S, lambda: report(devices, loop))


@click.command()
@click.option("--port", type=int, required=True, help="Of the broker on this machine.")
@click.option("--fleet", required=True)
@click.option("--backbone", required=True, help="The digest of the file that devices have already, in hex.")
@click.option("--prefix", required=True, help="Of the devices' names.")
@click.option("--devices", type=int, required=True)
@click.option("--idle", is_flag=True)
def main(*, port: int, fleet: str, backbone: str, prefix: str, devices: int, idle: bool) -> None:
    """Simulate devices."""
    loop = Loop()
    made = [
        SimulatedDevice(
            f"{prefix}-{number}",
            fleet=fleet,
            broker=BrokerAddress("127.0.0.1", port),
            backbone=bytes.fromhex(backbone),
            loop=loop,
            is_idle=idle,
        )
        for number in range(devices)
    ]
    print("{}", flush=True)
    sys.stdin.readline()
    for device in made:
        loop.after(0.0, device.start)
    report(made, loop)
    is_open = True

    def end(_mask: int) -> None:
        nonlocal is_open
        is_open = False

    loop.selector.register(sys.stdin, selectors.EVENT_READ, end)
    while is_open:
        loop.run_once()


main()
