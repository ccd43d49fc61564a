"""`edge-client`, `edge-client predict` and `edge-client status`."""

import json
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.core import ParameterSource

from edge_client.storage.outbox import DEFAULT_MB, LARGEST_MB, MIB
from protocol.cli import (
    access_options,
    config_option,
    counted,
    read_access,
    run,
    say,
    start_logging,
    stop_on_terminate,
    verbose_option,
)
from protocol.errors import ConfigError, ProtofleetError
from protocol.wire.topics import is_name

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from edge_client.runtime.session import Provider
    from edge_client.storage.device_state import DeviceState
    from edge_client.submission.prepared_submission import PreparedSubmission


FOLDER = click.Path(file_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)


def _setting(*names: str, **details: Any) -> Callable[[Any], Any]:
    """Return an option that can also be set by an environment variable."""
    variable = "PROTOFLEET_" + names[0].lstrip("-").replace("-", "_").upper()
    shown = details.get("default") is not None
    return click.option(*names, envvar=variable, show_envvar=True, show_default=shown, **details)


def _inherit(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Return the value given before the command's name, unless one is given after it."""
    name = option.name or ""
    if context.parent is None or context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
        return value
    return context.parent.params.get(name, value)


def _public_key(_context: click.Context, _option: click.Parameter, value: str | None) -> bytes | None:
    """Return 32 bytes from 64 hex digits."""
    if value is None:
        return None
    if re.fullmatch("[0-9A-Fa-f]{64}", value) is None:
        raise click.BadParameter(f"expected 64 hex digits as shown by `aggregator status`, got {value!r}")
    return bytes.fromhex(value)


fleet_option = _setting("--fleet", default="default", callback=_inherit, help="Name of the fleet.")
state_option = _setting(
    "--state",
    type=FOLDER,
    callback=_inherit,
    help="State directory  [default: ~/.local/state/protofleet/FLEET]",
)
provider_option = _setting(
    "--provider",
    type=click.Choice(["auto", "cpu", "cuda", "tensorrt"]),
    default="auto",
    callback=_inherit,
    help="ONNX Runtime execution provider; auto uses CUDA if available.",
)
threads_option = _setting(
    "--threads", type=COUNT, callback=_inherit, help="Threads for the backbone  [default: all cores]"
)


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@config_option
@_setting(
    "--enrollment",
    type=FOLDER,
    is_eager=True,
    help="Enrollment directory made by `aggregator enroll`: device id, fleet, broker and keys.",
)
@_setting("--broker", metavar="HOST[:PORT]", help="MQTT broker of the fleet.")
@access_options
@_setting(
    "--data",
    type=click.Path(path_type=Path),
    default=Path("data"),
    help="Directory with one subdirectory of images per class, or a CSV file with the columns path,label.",
)
@fleet_option
@_setting("--device-id", help="Device id  [default: derived from the machine]")
@state_option
@_setting("--once", is_flag=True, help="Exit once a head is installed and evaluated.")
@click.option("--dry-run", is_flag=True, help="Show what would be uploaded, upload nothing, and exit.")
@_setting(
    "--holdout",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.2,
    help="Fraction of the images held out to evaluate heads.",
)
@_setting(
    "--backbone",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Local copy of one of the task's backbones, used instead of a download; may be repeated.",
)
@provider_option
@threads_option
@_setting("--batch-size", type=COUNT, default=16, help="Images per run of the backbone.")
@_setting("--workers", type=COUNT, help="Threads for decoding images  [default: all cores, at most 4]")
@_setting(
    "--rescan-s", type=click.FloatRange(min=0.1), default=30.0, help="Seconds between scans for new images."
)
@_setting(
    "--strict",
    is_flag=True,
    help="Stop if a folder or label is no class of the task, instead of leaving its images out.",
)
@_setting(
    "--outbox-mb",
    type=click.IntRange(1, LARGEST_MB),
    default=DEFAULT_MB,
    help="MiB on disk for pending uploads; a larger submission is not uploaded.",
)
@_setting(
    "--aggregator-key",
    metavar="HEX",
    callback=_public_key,
    help="Public key of the aggregator, from `aggregator status`  [default: the first key received]",
)
@_setting(
    "--max-epsilon",
    type=click.FloatRange(0, min_open=True),
    help="Privacy budget (epsilon) for all submissions together; refuses tasks without differential privacy.",
)
@verbose_option
@click.version_option(package_name="protofleet")
@click.pass_context
def cli(context: click.Context, /, **options: Any) -> None:
    """Upload class prototypes of this device's labeled images, and install the classifier head of the fleet.

    Images never leave the device. Runs as a service until interrupted, or until done with --once or --dry-run.
    """
    if options["enrollment"] and context.get_parameter_source("fleet") is ParameterSource.DEFAULT:
        from protocol.enrollment import read_card

        # In the context too, from which a command inherits it.
        context.params["fleet"] = options["fleet"] = read_card(options["enrollment"]).fleet
    if context.invoked_subcommand is None:
        context.exit(_serve(**options))


def _serve(  # noqa: PLR0913 - every option of the command line
    *, verbose: bool, dry_run: bool, once: bool, broker: str | None, data: Path, fleet: str, device_id: str | None,
    state: Path | None, holdout: float, backbone: tuple[Path, ...], provider: "Provider", threads: int | None,
    batch_size: int, workers: int | None, rescan_s: float, strict: bool, outbox_mb: int, aggregator_key: bytes | None,
    enrollment: Path | None, max_epsilon: float | None, **access_given: Any,
) -> int:  # fmt: skip
    from edge_client.agent.state import Mode
    from edge_client.config import Settings, enrolled_identity, enrolled_name, merged_access
    from edge_client.runtime.session import require_runtime
    from edge_client.service.device import Device
    from edge_client.storage.stored_values import CurrentTask
    from protocol.enrollment import read_enrollment
    from protocol.mqtt.tls import parse_broker, readable_by_others, warnings

    start_logging(verbose=verbose)
    if once and dry_run:
        raise click.UsageError("--once and --dry-run cannot be used together")
    access, identity = read_access(**access_given), dict[str, Any]()
    if enrollment is not None:
        enrolled = read_enrollment(enrollment)
        device_id = enrolled_name("device-id", given=device_id, enrolled=enrolled.device)
        fleet = enrolled_name("fleet", given=fleet, enrolled=enrolled.fleet)
        broker = broker or enrolled.broker or None
        access = merged_access(access, enrolled)
        identity = enrolled_identity(enrolled, aggregator_key=aggregator_key)
    require_runtime()
    if not data.exists():
        raise ConfigError(
            f"no images at {data}: expected a directory with one subdirectory per class, or a CSV file with the "
            "columns path,label; pass it with --data, or an empty directory to receive heads only"
        )
    store = _open_state(state, fleet, lock=True, outbox_bytes=outbox_mb * MIB)
    device_id = store.device_id(device_id)
    if broker is None and not (dry_run and store.get(CurrentTask).digest):
        raise click.UsageError("missing broker: pass --broker HOST[:PORT]")
    address = parse_broker(broker, tls=access.tls) if broker else None
    notes = warnings(access, address) if address else []
    if enrollment is not None:
        notes.append(readable_by_others(enrollment / "signing.key"))
    for warning in filter(None, notes):
        log.warning("%s", warning)
    settings = Settings(
        broker=address,
        access=access,
        fleet=fleet,
        device_id=device_id,
        mode=Mode.DRY_RUN if dry_run else Mode.ONCE if once else Mode.SERVICE,
        data=data,
        holdout=holdout,
        provider=provider,
        threads=threads,
        batch_size=batch_size,
        workers=workers or min(4, os.cpu_count() or 1),
        max_epsilon=max_epsilon,
        backbones=backbone,
        rescan_s=rescan_s,
        strict=strict,
        **{"aggregator_key": aggregator_key, **identity},
    )
    stop_on_terminate()
    return Device(settings, store, show=_show_dry_run if dry_run else None).run()


@cli.command("predict")
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@fleet_option
@state_option
@provider_option
@threads_option
@click.option("--top", type=COUNT, default=3, show_default=True, help="Number of classes to print.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per image.")
def predict_command(
    *, images: tuple[Path, ...], fleet: str, state: Path | None, provider: "Provider", threads: int | None,
    top: int, as_json: bool,
) -> None:  # fmt: skip
    """Classify IMAGES with the installed head, offline."""
    from edge_client.inference import open_in_use, predict
    from edge_client.runtime.session import require_runtime
    from protocol.errors import StateError

    require_runtime()
    store = _open_state(state, fleet, read_only=True)
    with suppress(StateError):  # a disk that is read-only, on which failures of the head are not counted
        store = _open_state(state, fleet)
    installed, backbones, head = open_in_use(store, provider=provider, threads=threads)
    for note in {backbone.model.note: None for backbone in backbones if backbone.model.note}:
        say(note, err=True)
    failed = 0
    for prediction in predict(images, backbones, head, top=top, run_head=partial(store.run_head, installed)):
        if prediction.error:
            failed += 1
            say(f"error: {prediction.error}", err=True)
        elif as_json:
            scores = dict(prediction.top)
            line = {"image": str(prediction.path), "label": prediction.label, "scores": scores}
            click.echo(_json({**line, "head_version": installed.version, "round": installed.round}))
        else:
            shown = "  ".join(f"{name} {score:.1%}" for name, score in prediction.top)
            say(f"{prediction.path}: {shown}")
    if failed:
        raise ProtofleetError(f"{failed} of {len(images)} images could not be read")


@cli.command("status")
@fleet_option
@state_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status_command(*, fleet: str, state: Path | None, as_json: bool) -> None:
    """Show the device's images, submission, head and problems."""
    from edge_client.progress_bar import describe_speed

    summary = _status(_open_state(state, fleet, read_only=True))
    if as_json:
        click.echo(_json(summary, indent=2))
        return
    head, report, spent = summary["head"], summary["report"] or {"classes": []}, summary["privacy"]
    say(f"device     {summary['device_id']}, {'running' if summary['running'] else 'not running'}")
    say(f"task       {(summary['task'] or 'none')[:12]}")
    say(f"provider   {summary['runtime'] or 'none'}")
    for entry in report["classes"]:
        pending = f"; {entry['waiting']} waiting for {entry['more_needed']} more" if entry["waiting"] else ""
        say(
            f"class      {entry['name']}: {counted(entry['images'], 'image')}, {entry['held_out']} held out, "
            f"{counted(len(entry['counts']), 'prototype')}{pending}"
        )
    if (extraction := summary["extraction"]) is not None:
        speed = describe_speed(extraction["images_per_s"], extraction["left_s"]) if summary["running"] else ""
        say(f"features   {extraction['done']} of {extraction['total']} images{speed and f', {speed}'}")
    for name in summary["unknown_classes"]:
        say(f"left out   {name}: no class of the task")
    for reason, files in summary["skipped_files"].items():
        say(f"skipped    {counted(files, 'file')}: {reason}")
    if spent is not None:
        say(
            f"privacy    epsilon {spent['total_epsilon']:.3f} of {spent['max_epsilon']:g} spent in "
            f"{counted(spent['releases'], 'submission')}, at delta {spent['delta']:g}"
        )
    for label in filter(summary.get, ("duplicate", "problem")):
        say(f"{label:10} {summary[label]}")
    sent = "received by the aggregator" if summary["received"] else "not received yet"
    say(f"submission {report['size_bytes']} bytes, {sent}" if summary["report"] else "submission none")
    if head is None:
        say("head       none")
        return
    trained = "" if head["round"] is None else f" of round {head['round']}"
    correct, total = head["correct"], head["total"]
    accuracy = f", accuracy {correct / total:.1%} ({correct}/{total})" if total else ""
    if head["balanced"] is not None:
        accuracy += f", at least {head['balanced']:.1%} over all {head['known']} classes"
    say(f"head       version {head['version']}{trained}{accuracy}")


@cli.command("take-over")
@fleet_option
@state_option
def take_over_command(*, fleet: str, state: Path | None) -> None:
    """Continue with this state, although another program with the device's key was started later."""
    _open_state(state, fleet, read_only=True)  # raises where there is none, instead of creating one
    say(_open_state(state, fleet).take_over())


def _status(store: "DeviceState") -> dict[str, Any]:
    from edge_client.storage import stored_values as stored
    from protocol.wire.presence import Duplicate

    submission = store.outbox.newest_submission()
    report, spent = store.get(stored.SubmissionReport), store.get(stored.PrivacySpent)
    left_out, extraction = store.get(stored.LeftOut), store.get(stored.ExtractionProgress)
    problems = (
        store.get(stored.TaskProblem).text,
        store.get(stored.SpaceProblem).text,
        store.get(stored.ManifestProblem).text,
        store.get(stored.BuildProblem).text,
        store.get(stored.HeadProblem).text,
        store.get(stored.UploadProblem).text,
    )
    return {
        "device_id": store.get(stored.DeviceName).value or None,
        "running": store.is_locked(),
        "task": store.get(stored.CurrentTask).digest.hex() or None,
        "runtime": store.get(stored.BackboneProvider).name or None,
        "report": msgspec.to_builtins(report) if report.size_bytes else None,
        "extraction": {**msgspec.to_builtins(extraction), "left_s": extraction.left_s}
        if extraction.total
        else None,
        "unknown_classes": list(left_out.unknown),
        "skipped_files": dict(left_out.skipped),
        "privacy": msgspec.to_builtins(spent) if spent.releases else None,
        "duplicate": store.get(Duplicate).summary,
        "problem": next(filter(None, problems), ""),
        "submission": submission.digest.hex() if submission else None,
        "received": submission is not None and submission.received,
        "head": msgspec.to_builtins(store.get(stored.Heads).installed, builtin_types=(bytes,)),
    }


def _json(value: dict[str, Any], *, indent: int | None = None) -> str:
    """Return JSON, with null for NaN and infinity, which it lacks."""
    plain_values = json.loads(json.dumps(value, default=bytes.hex), parse_constant=lambda _: None)
    return json.dumps(plain_values, indent=indent, allow_nan=False)


def _show_dry_run(prepared: "PreparedSubmission", size_bytes: int) -> None:
    for entry in prepared.classes:
        spans = " to ".join(map(str, sorted({min(entry.counts), max(entry.counts)}))) if entry.counts else ""
        say(
            f"{entry.name}: {counted(entry.images, 'image')}, {entry.held_out} held out; "
            f"{counted(len(entry.counts), 'prototype')}"
            + (f" of {spans} {'image' if spans == '1' else 'images'}" if spans else ", too few images")
        )
    rows, size = prepared.prototypes.shape
    for name, change in prepared.changes.items():
        shape = " x ".join(map(str, change.shape))
        say(f"change of {name} in training: {shape} float16 values, in every round")
    for path, reason in prepared.unusable:
        say(f"image omitted: {path}: {reason}")
    if (spent := prepared.privacy) is not None:
        say(
            f"epsilon {spent.epsilon:.3f} for this submission, {spent.total_epsilon:.3f} for all {spent.releases} "
            f"together, at delta {spent.delta:g}; an upload will have other noise"
        )
    say(
        f"{counted(rows, 'prototype')} of {size} float16 values each: {size_bytes} bytes would be uploaded; "
        "nothing was uploaded"
    )


def _open_state(state: Path | None, fleet: str, **options: Any) -> "DeviceState":
    from edge_client.storage.device_state import DeviceState
    from protocol.storage.state_folder import default_state_folder

    if not is_name(fleet):
        expected = "1 to 64 letters, digits, '-' or '_'"
        raise click.BadParameter(f"{fleet!r}: expected {expected}", param_hint="--fleet")
    return DeviceState(state or default_state_folder(f"protofleet/{fleet}"), **options)


def main() -> None:
    """Run the console script."""
    run(cli, program="edge-client", extras="cpu")


if __name__ == "__main__":
    main()
