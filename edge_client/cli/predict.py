"""`edge-client predict`."""

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_client.cli.options import (
    COUNT,
    as_json_text,
    loading_modules,
    open_state,
    prior_option,
    provider_option,
    state_options,
    threads_option,
)
from protocol.cli import examples, plain, say, setting
from protocol.errors import ProtofleetError

if TYPE_CHECKING:
    from edge_client.graphs.session import Provider
    from edge_client.heads.class_prior import Setting
    from edge_client.heads.classifier import Prediction
    from edge_client.images.extraction import Refusal
    from edge_client.store.stored_values import InstalledHead

Print = Callable[[Path, "Prediction | Refusal", "InstalledHead"], None]

top_option = click.option(
    "--top", type=COUNT, default=3, show_default=True, help="Number of classes to print."
)
AT_ONCE = 10_000
"""Images that wait for their prior: more of them are predicted in parts, each with its own prior."""

min_probability_option = setting(
    "--min-probability",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Answer `unsure` below this probability.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per image.")
csv_option = click.option("--csv", "as_csv", is_flag=True, help="Print CSV with a header, one row per image.")


@click.command(
    "predict",
    epilog=examples(
        "edge-client predict photo.jpg",
        "edge-client predict photos --csv > predictions.csv",
        "find photos -name '*.jpg' | edge-client predict - --json",
    ),
)
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path))
@state_options
@provider_option
@threads_option
@prior_option
@min_probability_option
@top_option
@json_option
@csv_option
def predict_command(  # noqa: PLR0913 - every option of the command line
    *, images: tuple[Path, ...], fleet: str, state: Path | None, provider: "Provider", threads: int | None,
    prior: "Setting", min_probability: float, top: int, as_json: bool, as_csv: bool,
) -> None:  # fmt: skip
    """Classify IMAGES with the installed head, offline.

    IMAGES are files, folders, which are searched recursively, and patterns in quotes, such as 'photos/**/*.jpg'; `-`
    reads paths from stdin, one per line.
    """
    with loading_modules():
        from edge_client.cli.image_arguments import named_images
        from edge_client.graphs.session import require_runtime
        from edge_client.heads.class_prior import MAX_VALUES
        from edge_client.heads.classifier import open_classifier
        from edge_client.images.extraction import Refusal, first_readable
        from edge_client.progress_bar import Progress

        require_runtime()
    output = printer(as_json=as_json, as_csv=as_csv)
    paths = named_images(images)
    store = open_state(state, fleet, read_only=True)
    classifier = open_classifier(
        store,
        provider=provider,
        threads=threads,
        prior=prior,
        images=len(paths),
        min_probability=min_probability,
        sample=first_readable(paths),
    )
    for note in classifier.notes:
        say(note, err=True)
    at_once = 1
    if classifier.adjuster.needs_images:
        at_once = min(AT_ONCE, MAX_VALUES // len(classifier.head.classes))
    failed, is_shown = 0, at_once > 1 or not sys.stdout.isatty()  # otherwise the results themselves show it
    with closing(Progress("Images")) as progress:

        def on_progress(done: int) -> None:
            if is_shown:
                progress.update(done, len(paths))

        for path, prediction in classifier.predict(paths, top=top, at_once=at_once, on_progress=on_progress):
            if at_once > 1:
                progress.close()
            failed += isinstance(prediction, Refusal)
            output(path, prediction, classifier.installed)
    if failed:
        raise ProtofleetError(f"{failed} of {len(paths)} images could not be read")


def printer(*, as_json: bool, as_csv: bool) -> Print:
    """Return a function that prints a prediction of a head; that of an unusable image is an error on stderr.

    Raises:
        UsageError: both formats were given.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv cannot be used together")
    output = _print_json if as_json else _CsvPrinter() if as_csv else _TextPrinter()

    def print_one(path: Path, prediction: "Prediction | Refusal", head: "InstalledHead") -> None:
        from edge_client.images.extraction import Refusal

        if isinstance(prediction, Refusal):
            say(f"error: {path}: {prediction.reason}", err=True)
        else:
            output(path, prediction, head)

    return print_one


class _TextPrinter:
    """Prints a line per image, and on stderr the prior and its most frequent classes whenever the reason changes."""

    def __init__(self) -> None:
        self._shown = ("none", "as requested")

    def __call__(self, path: Path, prediction: "Prediction", _head: "InstalledHead") -> None:
        prior = prediction.prior
        if prediction.known is not False and (prior.source, prior.reason) != self._shown:
            frequent = sorted(prior.shares.items(), key=lambda item: -item[1])[:3]
            shares = (f"{name} {share:.0%}" for name, share in frequent)
            say("  ".join([f"prior: {prior.source} ({prior.reason})", *shares]), err=True)
            self._shown = (prior.source, prior.reason)
        scores = "  ".join(f"{name} {score:.1%}" for name, score in prediction.top)
        is_class = prediction.answer == prediction.label
        say(f"{path}: {scores}" if is_class else f"{path}: {prediction.answer} ({scores})")


def _print_json(path: Path, prediction: "Prediction", head: "InstalledHead") -> None:
    click.echo(as_json_text({"image": str(path), **prediction.fields(), **head.identity}))


class _CsvPrinter:
    """Prints rows, before the first one a header, with the most probable classes as pairs of columns."""

    def __init__(self) -> None:
        self._has_header = False

    def __call__(self, path: Path, prediction: "Prediction", head: "InstalledHead") -> None:
        import csv

        rows = csv.writer(sys.stdout, lineterminator="\n")
        if not self._has_header:
            numbers = range(1, len(prediction.top) + 1)
            pairs = (name for number in numbers for name in (f"label_{number}", f"probability_{number}"))
            rows.writerow(["image", *pairs, "head_version", "prior", "answer", "prior_reason"])
            self._has_header = True
        scores = (value for name, score in prediction.top for value in (plain(name), f"{score:.6f}"))
        prior = prediction.prior
        end = (head.version, prior.source, plain(prediction.answer), prior.reason)
        rows.writerow([plain(str(path)), *scores, *end])
        sys.stdout.flush()
