"""`python -m benchmarks NAME`: measurements for users."""

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
from protocol.cli import run

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


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Measure the figures of the documents on real data."""


for each in USER:
    cli.add_command(each)

if __name__ == "__main__":
    run(cli, program="python -m benchmarks")
