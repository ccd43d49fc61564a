"""`aggregator run`: the supervisor of the programs `serve`, `http` and the embedded broker."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from aggregator import EXTRAS
from aggregator.cli.state import state_option
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
from protocol.service_manager import stop_on_terminate

if TYPE_CHECKING:
    from protocol.mqtt.tls import BrokerAccess, BrokerAddress


@click.command(
    "run",
    epilog=examples(
        "aggregator run --task task.toml --embedded-broker",
        "aggregator run --task task.toml --broker broker.example --tls",
    ),
)
@config_option
@setting(
    "--task",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Task file (TOML): classes, backbones, algorithm and its settings.",
)
@state_option
@setting(
    "--blobs",
    default="",
    metavar="s3://BUCKET/PREFIX",
    help="S3-compatible object store of submissions, backbones and heads, each aggregator's with a prefix of "
    "its own; AWS_* variables say how to reach it. Default: the place used last; on the first start, the state "
    "directory.",
)
@setting(
    "--store",
    "database",
    default="",
    show_default=False,
    metavar="URL",
    help="PostgreSQL database for the tables, postgresql://[USER@]HOST[:PORT]/DATABASE, in place of a file in "
    "--state, which remembers it for the other commands. The password: PGPASSWORD or ~/.pgpass.",
)
@setting(
    "--broker",
    default="127.0.0.1",
    metavar="HOST[:PORT][,...]",
    help="MQTT broker to connect to (several are tried in turn), or the address that the embedded broker "
    "listens on.",
)
@access_options
@setting(
    "--embedded-broker",
    is_flag=True,
    help="Run a broker, too, for trying out; without --broker, reachable from this machine only. It accepts every "
    "client, and retained messages fill its memory.",
)
@setting(
    "--http",
    metavar="HOST:PORT",
    help="Address of the dashboard, the JSON API and the metrics, or off. Default: 127.0.0.1:8080, if that is "
    "free.",
)
@setting(
    "--http-token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the token that the dashboard requires, in line 1; or set PROTOFLEET_HTTP_TOKEN. Required "
    "unless --http is a loopback address; there, without one, commands require the token in STATE/http-token.",
)
@setting(
    "--http-read-token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with a token that is enough for reading, for Prometheus, in line 1; "
    "or set PROTOFLEET_HTTP_READ_TOKEN. With it, reading requires one of the tokens, also on loopback.",
)
@setting(
    "--http-host",
    multiple=True,
    metavar="NAME",
    help="Name under which browsers reach the dashboard, beside localhost and IP addresses; repeatable.",
)
@setting(
    "--http-cert",
    type=click.Path(dir_okay=False, path_type=Path),
    help="PEM file with the certificate for HTTPS and the certificates of its issuers; requires --http-key.",
)
@setting(
    "--http-key",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Private key of --http-cert, a PEM file without a password.",
)
@verbose_option
def run_command(  # noqa: PLR0913 - one for each option
    *,
    task: Path,
    state: Path,
    blobs: str,
    database: str,
    broker: str,
    embedded_broker: bool,
    http: str | None,
    http_token_file: Path | None,
    http_read_token_file: Path | None,
    http_host: tuple[str, ...],
    http_cert: Path | None,
    http_key: Path | None,
    verbose: bool,
    **access_given: Any,
) -> None:
    """Run the aggregator until interrupted.

    With --store, a second one for the same fleet is a standby: it waits, and leads when the first one ends.
    """
    stop_on_terminate()
    start_logging(verbose=verbose)
    require_packages("onnx", "onnxruntime", "scipy", extras=EXTRAS)
    from aggregator.http.process import listening_settings
    from aggregator.http.settings import http_settings
    from aggregator.messaging.broker_program import BrokerSettings
    from aggregator.server.program import ServeSettings
    from aggregator.supervisor import Program, Supervisor
    from protocol.mqtt.tls import BrokerAccess

    access = read_access(**access_given)
    dashboard = http_settings(
        http,
        token_file=http_token_file,
        hosts=http_host,
        extras=EXTRAS,
        read_token_file=http_read_token_file,
        certificate=http_cert,
        key=http_key,
    )
    brokers = _checked_brokers(broker, access, embedded_broker=embedded_broker)
    if dashboard is not None:
        to_broker = BrokerAccess(tls=access.tls, ca=access.ca)
        dashboard = msgspec.structs.replace(dashboard, brokers=brokers, access=to_broker)
    serving = ServeSettings(
        task=task,
        state=state,
        blobs=blobs,
        database=database,
        brokers=brokers,
        access=access,
        verbose=verbose,
        http_files=(http_cert, http_key) if http_cert is not None and http_key is not None else None,
    )
    with listening_settings(dashboard, state) as listening:
        programs = []
        if listening is not None:
            files = (listening.socket,)
            programs.append(Program("http", "aggregator.http", listening, descriptors=files, is_told=True))
        if embedded_broker:
            settings = BrokerSettings(brokers[0], verbose)
            programs.append(Program("broker", "aggregator.messaging.broker_program", settings))
        Supervisor([*programs, Program("serve", "aggregator.server.program", serving)]).run()


def _checked_brokers(
    text: str, access: "BrokerAccess", *, embedded_broker: bool
) -> "tuple[BrokerAddress, ...]":
    from protocol.mqtt.tls import NO_AUTHENTICATION, parse_brokers

    if embedded_broker and access != NO_AUTHENTICATION:
        raise click.UsageError("the embedded broker has neither encryption nor passwords: use mosquitto")
    brokers = parse_brokers(text, tls=access.tls)
    if embedded_broker and len(brokers) > 1:
        raise click.UsageError("the embedded broker listens on one address")
    return brokers


COMMANDS = (run_command,)
