"""`edge-client status`, `take-over` and `make-key`: a device's state and key, read and changed by its operator."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from edge_client.cli.options import MAX_DELTA, as_json_text, open_state, state_options
from protocol.cli import counted, examples, say
from protocol.statistics.noisy_sums import MOST_EPSILON, unit_in_words

if TYPE_CHECKING:
    from edge_client.store.device_state import DeviceState


@click.command("status", epilog=examples("edge-client status --json"))
@state_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status_command(*, fleet: str, state: Path | None, as_json: bool) -> None:
    """Show the device's images, submission, head and problems."""
    from edge_client.progress_bar import describe_speed

    summary = device_status(open_state(state, fleet, read_only=True))
    if as_json:
        click.echo(as_json_text(summary, indent=2))
        return
    report = summary["report"] or {"classes": []}
    say(f"device     {summary['device_id']}, {'running' if summary['running'] else 'not running'}")
    say(f"task       {(summary['task'] or 'none')[:12]}")
    say(f"provider   {summary['runtime'] or 'none'}")
    if summary["key"]:
        say(f"key        {summary['key']}, without an enrollment")
    for entry in report["classes"]:
        wanted = [f"{entry['missing']} missing"] if entry["missing"] else []
        wanted += [f"{entry['more_needed']} more"] if entry["more_needed"] or not wanted else []
        pending = f"; {entry['waiting']} waiting for {' and '.join(wanted)}" if entry["waiting"] else ""
        parts = [f"{entry['in_blocks']} in a block"] if entry["in_blocks"] else []
        parts += [counted(len(entry["counts"]), report["form"])] if entry["counts"] or not parts else []
        unused = f"; {entry['unused']} left out with their block" if entry["unused"] else ""
        unused += f", {entry['missing']} missing" if unused and entry["missing"] and not pending else ""
        say(
            f"class      {entry['name']}: {counted(entry['images'], 'image')}, {entry['held_out']} held out, "
            f"{', '.join(parts)}{pending}{unused}"
        )
    for line in _blocks(summary["report"]):
        say(line)
    if (extraction := summary["extraction"]) is not None:
        speed = describe_speed(extraction["images_per_s"], extraction["left_s"]) if summary["running"] else ""
        say(f"features   {extraction['done']} of {extraction['total']} images{speed and f', {speed}'}")
    _say_left_out(summary)
    for line in _privacy(summary):
        say(line)
    if (drift := summary["drift"]) is not None:
        say(f"drift      {drift['score']:.1f} standard deviations in {drift['images']} predicted images")
    for label in filter(summary.get, ("duplicate", "warning", "problem")):
        say(f"{label:10} {summary[label]}")
    say(f"submission {_submission(summary)}")
    if (in_s := summary["upload_in_s"]) is not None:
        say(f"upload     at the next slot, in {math.ceil(in_s / 60)} min: --upload-period-s")
    say(f"head       {_head(summary['head'], summary['task'])}")


def _blocks(report: dict[str, Any] | None) -> Iterator[str]:
    """Yield what went out in blocks, and what did before they were dissolved."""
    report = report or {"classes": [], "moved": 0, "dissolved": 0}
    counts = [entry["in_blocks"] for entry in report["classes"] if entry["in_blocks"]]
    if counts:
        means, rows = counted(len(counts), "class mean"), counted(report["directions"], "direction")
        yield f"block      {counted(sum(counts), 'image')}: {means} and {rows}"
    if moved := report["moved"]:
        yield f"moved      {counted(moved, 'image')} of the block, counted in the class of an earlier upload"
    if dissolved := report["dissolved"]:
        yield f"dissolved  {counted(dissolved, 'image')} in prototypes of dissolved blocks, or waiting"


def _privacy(summary: dict[str, Any]) -> Iterator[str]:
    """Yield what was spent, and what the owner demands."""
    if (spent := summary["privacy"]) is not None:
        limit = f" of {spent['max_epsilon']:g}" if spent["max_epsilon"] else ""
        adopted = f", of which {spent['adopted']} are adopted" if spent["adopted"] else ""
        is_conditional = ", conditional: it holds only if the second operator is honest"
        yield (
            f"privacy    epsilon {spent['total_epsilon']:.3f}{limit} spent in "
            f"{counted(spent['releases'], 'submission')}, at delta {spent['delta']:g}{adopted}, for "
            f"{unit_in_words(spent['images_per_person'])}{is_conditional if spent['conditional'] else ''}"
        )
        if spent["conditional"]:
            yield f"local      {_local(spent)}, to both operators together"
    if unit := summary["demanded_unit"]:
        yield f"demands    tasks with differential privacy of one {unit}"


def _local(spent: dict[str, Any]) -> str:
    local, limit = spent["local_epsilon"], spent["max_local_epsilon"]
    seen = "unknown epsilon" if local is None else f"epsilon {local:.3f}"
    return f"{seen} of {limit:g} spent" if limit is not None else f"{seen} spent, without a limit"


def _submission(summary: dict[str, Any]) -> str:
    if not summary["report"]:
        return "none"
    sent = "received by the aggregator" if summary["received"] else "not received yet"
    if summary["outdated"]:
        sent += "; it still counts: `aggregator revoke` and `aggregator forget` remove it"
    return f"{summary['report']['size_bytes']} bytes, {sent}"


def _head(head: dict[str, Any] | None, task: str | None) -> str:
    if head is None:
        return "none"
    trained = "" if head["round"] is None else f" of round {head['round']}"
    correct, total = head["correct"], head["total"]
    accuracy = f", accuracy {correct / total:.1%} ({correct}/{total})" if total else ""
    if head["correct_with_prior"] is not None and total:
        accuracy += f", {head['correct_with_prior'] / total:.1%} with the place's prior"
    if head["balanced"] is not None:
        accuracy += f", at least {head['balanced']:.1%} over all {head['known']} classes"
    is_earlier = head["task"] and head["task"].hex() != task
    of_task = f" of the earlier task {head['task'].hex()[:12]}" if is_earlier else ""
    return f"version {head['version']}{trained}{of_task}{accuracy}"


def _say_left_out(summary: dict[str, Any]) -> None:
    from edge_client.images.images import MOST_NAMED

    for name in summary["unknown_classes"]:
        say(f"left out   {name}: no class of the task")
    for reason, files in summary["skipped_files"].items():
        say(f"skipped    {counted(files, 'file')}: {reason}")
    unusable = summary["unusable_images"]
    for path, reason in unusable[:MOST_NAMED]:
        say(f"unusable   {path}: {reason}")
    if more := unusable[MOST_NAMED:]:
        say(f"unusable   {counted(len(more), 'image')} more: see --json")


@click.command("make-key", epilog=examples("edge-client make-key signing.key"))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def make_key_command(*, file: Path) -> None:
    """Create a private key FILE, and print its public key.

    An existing FILE is kept. For `aggregator enroll --key`: move FILE as signing.key into the folder that this
    command has made.
    """
    from protocol.storage.keyfile import read_or_make_key
    from protocol.wire.signing import public_key

    say(public_key(read_or_make_key(file)).hex())


@click.command(
    "adopt-spent", epilog=examples("edge-client adopt-spent", "edge-client adopt-spent --epsilon 3.2")
)
@state_options
@click.option(
    "--epsilon",
    type=click.FloatRange(0, MOST_EPSILON, min_open=True),
    help="What was spent that neither this state nor the aggregator knows, as of a device that has got another name.",
)
@click.option(
    "--delta",
    type=click.FloatRange(0, MAX_DELTA, min_open=True),
    default=1e-5,
    show_default=True,
    help="The delta of it.",
)
def adopt_spent_command(*, fleet: str, state: Path | None, epsilon: float | None, delta: float) -> None:
    """Record what was spent on privacy, on a device whose record is damaged or lost.

    What is left of the record stays. An intact device does without it: it adopts what the aggregator has stored.
    """
    from edge_client.privacy.adoption import adopt_spent

    open_state(state, fleet, read_only=True)  # raises where there is none, instead of creating one
    say(adopt_spent(open_state(state, fleet, lock=True), epsilon=epsilon, delta=delta))


@click.command("take-over", epilog=examples("edge-client take-over --state /var/lib/protofleet/edge-client"))
@state_options
def take_over_command(*, fleet: str, state: Path | None) -> None:
    """Continue with this state after another one was used.

    That is, a program with the device's key was started later on another state.
    """
    open_state(state, fleet, read_only=True)  # raises where there is none, instead of creating one
    say(open_state(state, fleet, lock=True).take_over())


def device_status(store: "DeviceState") -> dict[str, Any]:
    """Return what `status` shows, as JSON has it."""
    from edge_client.store.device_status import read_status

    status = read_status(store)
    summary: dict[str, Any] = msgspec.to_builtins(status, builtin_types=(bytes,))
    if status.extraction is not None:
        summary["extraction"]["left_s"] = status.extraction.left_s
    return summary
