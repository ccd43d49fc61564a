"""`python -m benchmarks NAME`: each measurement is a module with a command."""

import os

import click

# Read by OpenMP when torch is first imported: threads that spin while they wait slow their neighbors down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from benchmarks import device, fedpcl, fedtc, fpl, ingest, memory, poisoning, privacy, soak, step
from protocol.cli import run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Measure on real data what the documentation claims."""


cli.add_command(device.device)
cli.add_command(fedpcl.command)
cli.add_command(fedtc.command)
cli.add_command(fpl.command)
cli.add_command(ingest.ingest)
cli.add_command(memory.memory)
cli.add_command(poisoning.command)
cli.add_command(privacy.command)
cli.add_command(soak.soak)
cli.add_command(step.step)

if __name__ == "__main__":
    run(cli, program="python -m benchmarks")
