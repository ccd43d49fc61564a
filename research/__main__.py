"""`python -m research NAME`: attacks and protection, results of papers, and the choice of defaults."""

import os

import click

# Read by OpenMP when torch is first imported: spinning idle threads slow other processes down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from protocol.cli import run
from research import blocks, cells, families, hierarchical, published, resizing, restoration, statistics
from research.defaults import (
    block_edits,
    block_size,
    class_prior,
    confidence,
    default_layers,
    drift,
    forecast,
    head_choice,
    novelty,
    own_classes,
)
from research.poisoning import false_alarms, prototypes, rare_class, rounds, squares
from research.poisoning import statistics as poisoned_statistics
from research.privacy import audit, directions, measurement, noisy_sums, persons, sum_costs, timing
from research.privacy.blocks import command as principal_prototypes
from research.rounds import fedpcl, flower_tuning, fpl, step, tuning, wire_rivals

MODULES = (
    *(false_alarms, prototypes, rare_class, rounds, poisoned_statistics, directions, measurement, noisy_sums),
    *(principal_prototypes, sum_costs, squares, persons, audit, timing),
    *(fedpcl, fpl, published, statistics, step, tuning, flower_tuning, wire_rivals),
    *(class_prior, own_classes, confidence, default_layers, drift, forecast, head_choice, novelty, cells),
    *(hierarchical, restoration, families, blocks, block_size, block_edits, resizing),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Measure attacks and what protection costs, compare with papers, and choose defaults."""


for module in MODULES:
    cli.add_command(module.command)
cli.add_command(wire_rivals.tune)

if __name__ == "__main__":
    run(cli, program="python -m research")
