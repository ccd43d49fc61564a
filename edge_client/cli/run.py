"""`edge-client`: the device program as a service, once, or as a dry run."""

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edge_client.cli.options import (
    COUNT,
    FOLDER,
    fleet_option,
    loading_modules,
    open_state,
    provider_option,
    state_option,
    threads_option,
)
from protocol.cli import (
    access_options,
    config_option,
    counted,
    examples,
    read_access,
    say,
    setting,
    start_logging,
    verbose_option,
)
from protocol.errors import ConfigError
from protocol.service_manager import stop_on_terminate
from protocol.wire.messages import MAX_SUMMED

if TYPE_CHECKING:
    from edge_client.runtime.session import Provider
    from edge_client.storage.job_folder import Shown

log = logging.getLogger(__name__)


def _public_key(_context: click.Context, _option: click.Parameter, value: str | None) -> bytes | None:
    """Return 32 bytes from 64 hex digits."""
    if value is None:
        return None
    if re.fullmatch("[0-9A-Fa-f]{64}", value) is None:
        raise click.BadParameter(f"expected a public key, 64 hex digits, got {value!r}")
    return bytes.fromhex(value)


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "edge-client --broker broker.example --data /srv/images --dry-run",
        "edge-client --enrollment /etc/protofleet/enrollment --data /srv/images",
    ),
)
@config_option
@setting(
    "--enrollment",
    type=FOLDER,
    is_eager=True,
    help="Enrollment directory made by `aggregator enroll`: device id, fleet, broker and keys.",
)
@setting("--broker", metavar="HOST[:PORT][,...]", help="MQTT broker of the fleet; several are tried in turn.")
@access_options
@setting(
    "--data",
    type=click.Path(path_type=Path),
    default=Path("data"),
    help="Directory with one subdirectory of images per class, or a CSV file with the columns path,label.",
)
@fleet_option
@setting("--device-id", help="Device id  [default: derived from the machine]")
@state_option
@setting("--once", is_flag=True, help="Exit once a head is installed and evaluated.")
@click.option("--dry-run", is_flag=True, help="Show what would be uploaded, upload nothing, and exit.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="With --dry-run and --backbone, and without a fleet: print seconds an image, memory and bytes as JSON.",
)
@setting(
    "--holdout",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.2,
    help="Fraction of the images held out to evaluate heads.",
)
@setting(
    "--backbone",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Local copy of one of the task's backbones, used instead of a download; may be repeated.",
)
@provider_option
@threads_option
@setting("--batch-size", type=COUNT, default=16, hidden=True, help="Images per run of the backbone.")
@setting(
    "--rescan-s",
    type=click.FloatRange(min=0.1),
    default=30.0,
    hidden=True,
    help="Seconds between scans for new images.",
)
@setting(
    "--aggregator-key",
    metavar="HEX",
    callback=_public_key,
    help="Public key of the aggregator, from `aggregator status`  [default: the first key received]",
)
@setting(
    "--max-epsilon",
    type=click.FloatRange(0, min_open=True),
    help="Privacy budget (epsilon) for all submissions together; refuses tasks without differential privacy.",
)
@setting(
    "--second-operator",
    metavar="HEX",
    callback=_public_key,
    help="`seal_key` of the second operator, from its operator.toml: refuses tasks without it. Without this option,"
    " tasks with a second operator are refused. Needs --max-epsilon.",
)
@setting(
    "--min-devices",
    type=click.IntRange(2, MAX_SUMMED),
    help="Devices in a sum before the second operator may open this device's part  [default: the task's]",
)
@verbose_option
@click.version_option(package_name="protofleet")
@click.pass_context
def cli(context: click.Context, /, **options: Any) -> None:
    """Upload class prototypes of this device's labeled images, and install the classifier head of the fleet.

    No image is uploaded. Runs as a service until interrupted, or until done with --once or --dry-run.
    """
    if options["enrollment"] and context.get_parameter_source("fleet") is ParameterSource.DEFAULT:
        from protocol.enrollment import read_card

        # In the context too, from which a command inherits it.
        context.params["fleet"] = options["fleet"] = read_card(options["enrollment"]).fleet
    if context.invoked_subcommand is None:
        context.exit(_serve(**options))


def _serve(  # noqa: PLR0913 - every option of the command line
    *, verbose: bool, dry_run: bool, as_json: bool, once: bool, broker: str | None, data: Path, fleet: str,
    device_id: str | None, state: Path | None, holdout: float, backbone: tuple[Path, ...], provider: "Provider",
    threads: int | None, batch_size: int, rescan_s: float, aggregator_key: bytes | None,
    enrollment: Path | None, max_epsilon: float | None, second_operator: bytes | None,
    min_devices: int | None, **access_given: Any,
) -> int:  # fmt: skip
    with loading_modules():
        from edge_client.agent.state import Mode, StoredState
        from edge_client.config import membership
        from edge_client.service.device import Device
        from protocol.mqtt.tls import readable_by_others, warnings

    start_logging(verbose=verbose)
    if once and dry_run:
        raise click.UsageError("--once and --dry-run cannot be used together")
    if as_json and not (dry_run and backbone):
        raise click.UsageError("--json needs --dry-run and --backbone")
    if second_operator is not None and max_epsilon is None:
        raise click.UsageError("--second-operator needs --max-epsilon, the limit of what a sum may reveal")
    member = membership(
        enrollment,
        broker=broker,
        fleet=fleet,
        device_id=device_id,
        access=read_access(**access_given),
        aggregator_key=aggregator_key,
    )
    if not data.exists():
        raise ConfigError(
            f"no images at {data}: expected a directory with one subdirectory per class, or a CSV file with the "
            "columns path,label; pass it with --data, or an empty directory to receive heads only"
        )
    if as_json:
        from edge_client.cli.cost import measure

        options: dict[str, Any] = {
            "data": data,
            "backbones": backbone,
            "holdout": holdout,
            "provider": provider,
        }
        say(json.dumps(measure(**options, threads=threads, batch_size=batch_size)))
        return 0
    store = open_state(state, member.fleet, lock=True)
    device_id = store.device_id(member.device_id)
    if member.broker is None and not (dry_run and store.get(StoredState).task):
        raise click.UsageError("missing broker: pass --broker HOST[:PORT]")
    notes = warnings(member.access, member.broker) if member.broker else []
    if enrollment is not None:
        notes.append(readable_by_others(enrollment / "signing.key"))
    for warning in filter(None, notes):
        log.warning("%s", warning)
    settings = member.settings(
        device_id=device_id,
        mode=Mode.DRY_RUN if dry_run else Mode.ONCE if once else Mode.SERVICE,
        data=data,
        holdout=holdout,
        provider=provider,
        threads=threads,
        batch_size=batch_size,
        max_epsilon=max_epsilon,
        second_operator=second_operator,
        min_devices=min_devices,
        backbones=backbone,
        rescan_s=rescan_s,
    )
    stop_on_terminate()
    device = Device(settings, store, show=_show_dry_run if dry_run else None)
    return device.run()


def _show_dry_run(shown: "Shown") -> None:
    report = shown.report
    for entry in report.classes:
        spans = " to ".join(map(str, sorted({min(entry.counts), max(entry.counts)}))) if entry.counts else ""
        in_rows = counted(len(entry.counts), report.form) + (
            f" of {spans} {'image' if spans == '1' else 'images'}" if spans else ", too few images"
        )
        parts = [in_rows] if entry.counts or not (entry.in_blocks or entry.unused) else []
        parts += [f"{entry.in_blocks} in a block"] if entry.in_blocks else []
        parts += [f"{entry.unused} left out with their block"] if entry.unused else []
        say(f"{entry.name}: {counted(entry.images, 'image')}, {entry.held_out} held out; {', '.join(parts)}")
    for name, (shape, size_bytes) in shown.tensors.items():
        if report.form.endswith("class sum"):
            say(f"{name.replace('_', ' ')}: {size_bytes} bytes")
            continue
        say(f"change of {name} in training: {' x '.join(map(str, shape))} float16 values, in every round")
    for path, reason in report.unusable:
        say(f"image omitted: {path}: {reason}")
    if (spent := shown.privacy) is not None:
        say(
            f"epsilon {spent.epsilon:.3f} for this submission, {spent.total_epsilon:.3f} for all {spent.releases} "
            f"together, at delta {spent.delta:g}; an upload will have other noise"
        )
    if shown.block_images:
        means, directions = counted(shown.means, "class mean"), counted(shown.directions, "direction")
        say(
            f"{counted(shown.block_images, 'image')} in a block: {means} and {directions} of {shown.size} values each"
        )
    if report.moved:
        say(f"{counted(report.moved, 'image')} of the block would count in the class of an earlier upload")
    if report.dissolved:
        say(
            f"dissolved blocks of {counted(report.dissolved, 'image')}: the groups that are whole are prototypes"
        )
    has_rows = shown.rows or not shown.block_images
    in_rows = f"{counted(shown.rows, report.form)} of {shown.size} values each: " if has_rows else ""
    say(f"{in_rows}{shown.size_bytes} bytes would be uploaded; nothing was uploaded")
    if report.warning:
        say(f"warning: {report.warning}")
