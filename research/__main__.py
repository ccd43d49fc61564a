"""`python -m research NAME`: attacks on uploads and on training, what protection costs, and variants of algorithms."""

import os

import click

# Read by OpenMP when torch is first imported: spinning idle threads slow other processes down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from protocol.cli import run
from research import cells, hierarchical, restoration
from research.poisoning import false_alarms, prototypes, rare_class, rounds, statistics
from research.privacy import directions, measurement

MODULES = (
    *(false_alarms, prototypes, rare_class, rounds, statistics),
    *(cells, directions, hierarchical, measurement, restoration),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Measure attacks on submissions and on training, what protection costs, and variants of algorithms."""


for module in MODULES:
    cli.add_command(module.command)

if __name__ == "__main__":
    run(cli, program="python -m research")
