"""`edge-client watch`."""

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_client.cli.options import (
    FOLDER,
    fleet_option,
    loading_modules,
    open_state_to_predict,
    prior_option,
    provider_option,
    state_option,
    threads_option,
)
from edge_client.cli.predict import Print, csv_option, json_option, printer, top_option
from protocol.cli import examples, start_logging, verbose_option
from protocol.errors import ConfigError, ProtofleetError
from protocol.service_manager import stop_on_terminate

if TYPE_CHECKING:
    from edge_client.data.class_prior import Source
    from edge_client.predict.classifier import Classifier
    from edge_client.predict.folder_watch import FolderWatch
    from edge_client.runtime.session import Provider

log = logging.getLogger(__name__)


@click.command("watch", epilog=examples("edge-client watch /srv/camera --json"))
@click.argument("folder", type=FOLDER)
@fleet_option
@state_option
@provider_option
@threads_option
@prior_option
@top_option
@json_option
@csv_option
@click.option("--existing", is_flag=True, help="Classify the images that are in FOLDER at the start, too.")
@click.option(
    "--interval-s", type=click.FloatRange(min=0.05), default=0.5, show_default=True,
    help="Seconds between searches for new images.",
)  # fmt: skip
@verbose_option
def watch_command(  # noqa: PLR0913 - every option of the command line
    *, folder: Path, fleet: str, state: Path | None, provider: "Provider", threads: int | None,
    prior: "Source", top: int, as_json: bool, as_csv: bool, existing: bool, interval_s: float, verbose: bool,
) -> None:  # fmt: skip
    """Classify each new image in FOLDER, and below it, with the newest head, until interrupted.

    An image that is still being written is waited for, and one that changes is classified again.
    """
    with loading_modules():
        from edge_client.predict.folder_watch import FolderWatch
        from edge_client.predict.head_in_use import HeadInUse
        from edge_client.runtime.session import require_runtime
        from protocol.log import event

        require_runtime()
    start_logging(verbose=verbose)
    if not folder.is_dir():
        raise ConfigError(f"expected a folder to watch, got {folder}")
    output = printer(as_json=as_json, as_csv=as_csv)
    store = open_state_to_predict(state, fleet)
    heads = HeadInUse(store, provider=provider, threads=threads, prior=prior)
    watch = FolderWatch(folder, existing=existing)
    stop_on_terminate()
    event(log, logging.INFO, "watching", folder=folder)
    while True:
        with suppress(ProtofleetError):  # as long as there is no head that works, which is logged
            classify_new(watch, heads.follow(), top=top, output=output)
        time.sleep(interval_s)


def classify_new(watch: "FolderWatch", classifier: "Classifier", *, top: int, output: Print) -> None:
    """Print a prediction for each image that is ready, and an error for one that stays unusable."""
    from protocol.log import event

    paths = watch.poll()
    try:
        for prediction in classifier.predict(paths, top=top):
            if watch.done(prediction.path, failed=bool(prediction.error)):
                output(prediction, classifier.installed)
    except ProtofleetError as error:  # the backbone or the head fails on one of them
        event(log, logging.ERROR, "images not classified", images=len(paths), reason=str(error))
        for path in paths:
            watch.done(path)
