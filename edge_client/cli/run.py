"""`edge-client run` and `dry-run`: the device program as a service, and what it would upload."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.core import ParameterSource

from edge_client.cli.options import (
    CONDITIONAL,
    CONFIG,
    FOLDER,
    as_json_text,
    backbone_option,
    extraction_options,
    member_options,
    open_state,
    privacy_options,
)
from protocol.cli import counted, examples, read_access, say, setting, start_logging, verbose_option
from protocol.errors import ConfigError
from protocol.service_manager import stop_on_terminate

if TYPE_CHECKING:
    from edge_client.config import PrivacyUnit
    from edge_client.graphs.session import Provider
    from edge_client.store.job_folder import Shown

log = logging.getLogger(__name__)

_SHARED = ("config", "enrollment", "fleet", "state", "provider", "threads", "verbose")
"""Options of `run` that `serve` and `watch` have, too."""


@click.command(
    "run",
    context_settings={"allow_extra_args": True},
    epilog=examples(
        "edge-client run --broker broker.example --data /srv/images",
        "edge-client run --config /etc/protofleet/edge-client.toml",
        "edge-client run --broker broker.example --serve --watch /srv/camera",
    ),
)
@member_options
@extraction_options
@backbone_option
@privacy_options
@setting("--once", is_flag=True, help="Exit once a head is installed and evaluated.")
@setting(
    "--rescan-s",
    type=click.FloatRange(min=0.1),
    default=30.0,
    hidden=True,
    help="Seconds between scans for new images.",
)
@setting(
    "--serve", is_flag=True, help="Run `edge-client serve`, too, with the options in [serve] of the file."
)
@setting(
    "--watch", type=FOLDER, help="Run `edge-client watch`, too, with the options in [watch] of the file."
)
@verbose_option
@click.pass_context
def run_command(context: click.Context, /, *, serve: bool, watch: Path | None, **options: Any) -> None:
    """Upload prototypes of labeled images, and install the fleet's heads.

    Runs until interrupted. No image is uploaded. A table [serve] in the file of --config stands for --serve, and
    [watch] with a folder for --watch.
    """
    if context.args:
        raise click.UsageError(
            f"unexpected argument {context.args[0]!r}: options follow the name of a command"
        )
    shared = _given(context)
    programs = {
        **({"serve": shared} if serve else {}),
        **({"watch": [str(watch), *shared]} if watch is not None else {}),
    }
    context.exit(_serve(programs=programs, **options))


def _given(context: click.Context) -> list[str]:
    """Return the options for `serve` and `watch` that were given on the command line: they have the others already."""
    values, given = {**context.params, "config": context.meta.get(CONFIG)}, list[str]()
    for name in _SHARED:
        value = values[name]
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE and value is not False:
            given += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return given


@click.command(
    "dry-run",
    epilog=examples("edge-client dry-run --broker broker.example --data /srv/images"),
)
@member_options
@extraction_options
@backbone_option
@privacy_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@verbose_option
@click.pass_context
def dry_run_command(context: click.Context, /, **options: Any) -> None:
    """Show what this device would upload, and upload nothing."""
    context.exit(_serve(dry_run=True, once=False, rescan_s=30.0, programs={}, **options))


def _serve(  # noqa: PLR0913 - every option of the command line
    *, programs: Mapping[str, Sequence[str]], verbose: bool, once: bool, dry_run: bool = False,
    as_json: bool = False, broker: str | None, data: Path, fleet: str | None,
    device_id: str | None, state: Path | None, holdout: float, backbone: tuple[Path, ...], provider: "Provider",
    threads: int | None, batch_size: int, rescan_s: float, aggregator_key: bytes | None,
    enrollment: Path | None, max_epsilon: float | None, max_delta: float, max_local_epsilon: float | None,
    privacy_unit: "PrivacyUnit | None", allow_non_private_tasks: bool, second_operator: bytes | None,
    min_devices: int | None, pin_backbone: tuple[bytes, ...], variable_time: bool,
    max_images: int | None, upload_period_s: float | None, **access_given: Any,
) -> int:  # fmt: skip
    from edge_client.config import membership
    from edge_client.core.state import Mode, StoredState
    from edge_client.service.device import Device
    from edge_client.service.programs import running
    from protocol.mqtt.tls import readable_by_others, warnings

    start_logging(verbose=verbose)
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
        max_delta=max_delta,
        max_local_epsilon=max_local_epsilon,
        privacy_unit=privacy_unit,
        allow_non_private_tasks=allow_non_private_tasks,
        second_operator=second_operator,
        min_devices=min_devices,
        pinned_backbones=pin_backbone,
        variable_time=variable_time,
        max_images=max_images,
        upload_period_s=upload_period_s,
        backbones=backbone,
        rescan_s=rescan_s,
    )
    stop_on_terminate()
    device = Device(settings, store, show=(_print_json if as_json else _show_dry_run) if dry_run else None)
    with running(programs):
        return device.run()


def _print_json(shown: "Shown") -> None:
    privacy = msgspec.to_builtins(shown.privacy, builtin_types=(bytes,))
    click.echo(as_json_text({**msgspec.to_builtins(shown.report), "privacy": privacy}, indent=2))


def _show_cost(shown: "Shown") -> None:
    if (spent := shown.privacy) is None:
        return
    say(
        f"epsilon {spent.epsilon:.3f} for this submission, {spent.total_epsilon:.3f} for all {spent.releases} "
        f"together, at delta {spent.delta:g}; an upload will have other noise"
    )
    if shown.report.form == "masked class sum":
        say(f"{CONDITIONAL}; see --max-local-epsilon")


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
    _show_cost(shown)
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
