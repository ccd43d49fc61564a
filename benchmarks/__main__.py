"""`python -m benchmarks NAME`: measurements for users; `python -m benchmarks research NAME`: attacks and their cost."""

import os

import click

# Read by OpenMP when torch is first imported: spinning idle threads slow other processes down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from benchmarks import pages
from benchmarks.accuracy import (
    class_prior,
    confidence,
    default_layers,
    drift,
    fedpcl,
    fedtc,
    few_images,
    forecast,
    fpl,
    novelty,
    published,
    statistics,
    tuning,
)
from benchmarks.accuracy.flower import command as flower
from benchmarks.accuracy.which import command as which
from benchmarks.accuracy.wire import command as wire
from benchmarks.cost import device, fleet, int8, memory, step, sums, train
from benchmarks.cost.engines import command as engines
from benchmarks.cost.fleet_load import storm
from benchmarks.cost.uploads import databases, ingest, receivers
from benchmarks.cost.ways import command as ways
from benchmarks.programs import features, predict, start, take_over
from benchmarks.research import cells, hierarchical, restoration
from benchmarks.research.poisoning import false_alarms, prototypes, rare_class, rounds
from benchmarks.research.poisoning import statistics as poisoned_statistics
from benchmarks.research.privacy import directions, measurement
from protocol.cli import run

_HELP = {"help_option_names": ["-h", "--help"]}

USER = (
    *(
        class_prior.command,
        confidence.command,
        default_layers.command,
        fedpcl.command,
        fedtc.command,
        drift.command,
        few_images.command,
        flower.command,
        fpl.command,
        forecast.command,
        novelty.command,
        published.command,
    ),
    *(statistics.command, tuning.command, which.command, wire.command),
    *(
        databases.command,
        device.device,
        engines.command,
        features.features,
        fleet.command,
        ingest.ingest,
        receivers.receivers,
        int8.command,
        memory.memory,
        predict.predict,
        start.start,
        step.step,
        storm.command,
        sums.command,
        take_over.command,
        train.command,
        ways.command,
        pages.command,
    ),
)
RESEARCH = (
    *(false_alarms.command, prototypes.command, rare_class.command, rounds.command),
    poisoned_statistics.command,
    *(cells.command, directions.command, hierarchical.command, measurement.command, restoration.command),
)


@click.group(context_settings=_HELP)
def cli() -> None:
    """Measure the figures of the documents on real data."""


@cli.group(context_settings=_HELP)
def research() -> None:
    """Measure attacks on submissions and on training, what protection costs, and variants of algorithms."""


for each in USER:
    cli.add_command(each)
for each in RESEARCH:
    research.add_command(each)

if __name__ == "__main__":
    run(cli, program="python -m benchmarks")
