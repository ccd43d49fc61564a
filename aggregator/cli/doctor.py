"""`aggregator doctor`."""

from pathlib import Path
from typing import Any

import click

from aggregator.cli.state import EXTRAS, state_option
from protocol.cli import access_options, config_option, examples, read_access, require_packages, setting


@click.command("doctor", epilog=examples("aggregator doctor --task task.toml --broker broker.example --tls"))
@config_option
@setting("--task", type=click.Path(dir_okay=False, path_type=Path), help="Task file (TOML).")
@state_option
@setting(
    "--broker", default="127.0.0.1", metavar="HOST[:PORT][,...]", help="MQTT broker of the fleet, or several."
)
@access_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor_command(
    context: click.Context,
    /,
    *,
    task: Path | None,
    state: Path,
    broker: str,
    as_json: bool,
    **access_given: Any,
) -> None:
    """Check packages, task file, state, disk, clock, keys, broker, TLS, login, access list and packet limit.

    Takes the options of `run`, changes nothing, and says what to do. The exit status is 1 if a check failed; warnings
    leave it 0. What it publishes are empty messages, which programs ignore.
    """
    require_packages("onnx", "rpds", "scipy", extras=EXTRAS)
    from aggregator.doctor import Surroundings, check_all
    from protocol.doctor.findings import report
    from protocol.mqtt.tls import parse_brokers

    access = read_access(**access_given)
    given = Surroundings(task, state, parse_brokers(broker, tls=access.tls), access)
    context.exit(report(check_all(given), as_json=as_json))
