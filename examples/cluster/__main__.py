"""`python -m examples.cluster` kills programs of a cluster while devices upload, and compares its head."""

import os
import shutil
import signal
import sys
from pathlib import Path

import click

try:
    from examples.cluster.experiment import FAULTS, problems, run_cluster, run_single
    from examples.quickstart import digits as data
    from examples.quickstart.folder import Folder, device_names, prepare
    from protocol.cli import counted, run
    from protocol.errors import ConfigError, ProtofleetError
    from tests.support.databases.postgresql import postgresql_program
    from tests.support.network.nats import nats_program
except ImportError as error:
    sys.exit(f"error: {error}: pip install -e '.[cpu,demo,cluster]' 'moto[server]' psutil pytest")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("cluster"),
    show_default=True,
    help="Folder for images, states, logs and the head; an earlier run's is replaced.",
)
@click.option(
    "--devices",
    type=click.IntRange(data.FEWEST_DEVICES, 200),
    default=50,
    show_default=True,
    help="How many devices.",
)
@click.option(
    "--fault",
    "faults",
    type=click.Choice(tuple(FAULTS)),
    multiple=True,
    help="Kill this only; repeatable.  [default: all]",
)
def cli(*, out: Path, devices: int, faults: tuple[str, ...]) -> None:
    """Kill programs of a cluster while 50 devices upload; its head must be that of a single process.

    Exit status 1 if the heads differ, or if a submission was lost or counted twice.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ["OMP_NUM_THREADS"] = "1"  # there is a process for each device
    require_programs()
    folder, names = Folder(out.resolve()), device_names(devices)
    digits = data.load()
    prepare(folder, digits, data.deal(digits.labels, devices=devices, seed=0), names=names, seed=0)
    for path in (folder.root / "services", folder.root / "roles"):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    try:
        head, submitted, accepted = run_cluster(folder, names, faults or FAULTS)
        single = run_single(folder, names)
    except AssertionError as error:  # the harness of the tests has waited too long
        raise ProtofleetError(f"{str(error).splitlines()[0]}; logs in {folder.logs}") from error
    print(f"{len(head.submissions)} of {counted(devices, 'submission')} in the cluster's head")
    print(f"head.onnx of the cluster      {head.digest}\nhead.onnx of a single process {single.digest}")
    found = problems(head, single, submitted=submitted, accepted=accepted)
    print("\n".join(found or ["SAME HEAD"]))
    sys.exit(1 if found else 0)


def require_programs() -> None:
    """Raise ConfigError if a program of Debian is not installed."""
    for package, path in (("nats-server", nats_program()), ("postgresql", postgresql_program("initdb"))):
        if path is None:
            raise ConfigError(f"{package} is not installed: apt-get install {package}")


if __name__ == "__main__":
    run(cli, program="python -m examples.cluster")
