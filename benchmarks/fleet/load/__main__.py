"""A process of simulated devices: begins when a line arrives on stdin, and ends when stdin is closed.

It prints its progress as a line of JSON, and what each device has once all are done.
"""

import json
import selectors
import sys
from collections.abc import Sequence
from typing import Any

import click

from benchmarks.fleet.load.device import SimulatedDevice
from benchmarks.fleet.load.sessions import Loop
from protocol.mqtt.tls import BrokerAddress

REPORT_S = 0.5


def progress_of(devices: Sequence[SimulatedDevice]) -> dict[str, Any]:
    """Return counts so far, and times by `time.monotonic`, which all processes share; 0 until then.

    `received` counts devices whose submission the aggregator has received, the last of them at `received_s`. `head_s`
    is when the first device had the head, `done_s` when the last evaluation was received.
    """
    received, heads, done = (
        [time_s for each in devices if (time_s := getattr(each, name))]
        for name in ("received_s", "head_s", "evaluated_s")
    )
    progress: dict[str, Any] = {
        "connected": sum(each.session.is_connected for each in devices),
        "attempts": sum(each.session.attempts for each in devices),
        "frames": sum(each.frames for each in devices),
        "receipts": sum(each.receipts for each in devices),
        "received": len(received),
        "received_s": max(received, default=0.0),
        "head_s": min(heads, default=0.0),
        "done_s": max(done, default=0.0),
    }
    if len(done) == len(devices):
        progress["devices"] = {each.name: (each.submission.hex(), each.head.hex()) for each in devices}
    return progress


def report(devices: Sequence[SimulatedDevice], loop: Loop) -> None:
    """Print the progress, and again later until all devices are done."""
    progress = progress_of(devices)
    print(json.dumps(progress), flush=True)
    if "devices" not in progress:
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
    loop, broker = Loop(), BrokerAddress("127.0.0.1", port)
    made = [
        SimulatedDevice(
            f"{prefix}-{number}",
            fleet=fleet,
            broker=broker,
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
