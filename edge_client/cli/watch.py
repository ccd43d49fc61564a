"""`edge-client watch`."""

import functools
import logging
import re
import time
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_client.cli.options import (
    FOLDER,
    loading_modules,
    open_state,
    prior_option,
    provider_option,
    state_options,
    threads_option,
)
from edge_client.cli.predict import (
    Print,
    csv_option,
    json_option,
    min_probability_option,
    printer,
    top_option,
)
from protocol.cli import access_options, examples, read_access, setting, start_logging, verbose_option
from protocol.errors import ConfigError, ProtofleetError
from protocol.service_manager import stop_on_terminate

if TYPE_CHECKING:
    from edge_client.apps.watch.folder import FolderWatch
    from edge_client.apps.watch.home_assistant import Sensor
    from edge_client.apps.watch.majority import Majority
    from edge_client.graphs.session import Provider
    from edge_client.heads.class_prior import Setting
    from edge_client.heads.classifier import Classifier, Prediction
    from edge_client.images.extraction import Refusal
    from edge_client.store.stored_values import InstalledHead

log = logging.getLogger(__name__)

_PREFIX = "PROTOFLEET_PUBLISH_"
"""Of the variables with credentials for --publish: its broker must not get the fleet's."""

INTERVAL_S = 0.5
"""Seconds between searches for new images, at least."""
MAX_LOAD = 0.1
"""Share of the time in which the folder may be searched: a search of 100,000 images takes seconds."""


def _agreement(text: str) -> tuple[int, int]:
    """Return N and IMAGES of N/IMAGES."""
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text, re.ASCII)
    needed, images = map(int, found.groups()) if found else (0, 0)
    if not needed <= images < 2 * needed:
        raise click.BadParameter(
            f"expected N/IMAGES with N more than half of them, such as 2/3, got {text!r}"
        )
    return needed, images


@click.command(
    "watch",
    epilog=examples(
        "edge-client watch /srv/camera --json",
        "edge-client watch /srv/camera --agree 2/3 --publish homeassistant.local --username camera --password-file pw",
    ),
)
@click.argument("folder", type=FOLDER)
@state_options
@provider_option
@threads_option
@prior_option
@min_probability_option
@top_option
@json_option
@csv_option
@click.option("--existing", is_flag=True, help="Classify the images that are in FOLDER at the start, too.")
@click.option(
    "--agree",
    type=_agreement,
    metavar="N/IMAGES",
    help="Print a line only when the answer changes on which N of the newest IMAGES agree, such as 2/3.",
)
@setting(
    "--publish",
    metavar="HOST[:PORT]",
    help="MQTT broker to which answers are published as a sensor of Home Assistant.",
)
@click.option("--sensor", metavar="NAME", help="Name of that sensor  [default: the folder's name]")
@functools.partial(access_options, prefix=_PREFIX)
@verbose_option
def watch_command(  # noqa: PLR0913 - every option of the command line
    *, folder: Path, fleet: str, state: Path | None, provider: "Provider", threads: int | None,
    prior: "Setting", min_probability: float, top: int, as_json: bool, as_csv: bool, existing: bool,
    agree: tuple[int, int] | None, publish: str | None, sensor: str | None, verbose: bool, **access_given: Any,
) -> None:  # fmt: skip
    """Classify each new image in FOLDER with the newest head.

    Runs until interrupted. Folders in FOLDER are searched, too. An image that is still being written is waited for,
    and one that changes is classified again. With --agree, FOLDER has the images of one camera.
    """
    with loading_modules():
        from edge_client.apps.head_in_use import HeadInUse
        from edge_client.apps.watch.folder import FolderWatch
        from edge_client.apps.watch.majority import Majority
        from edge_client.graphs.session import require_runtime
        from protocol.log import event

        require_runtime()
    start_logging(verbose=verbose)
    if not folder.is_dir():
        raise ConfigError(f"expected a folder to watch, got {folder}")
    if publish is None and (sensor is not None or any(access_given.values())):
        raise ConfigError(
            "--sensor, --username and the other options of a broker belong to --publish: give --publish HOST"
        )
    output = printer(as_json=as_json, as_csv=as_csv)
    store = open_state(state, fleet, read_only=True)
    opened = None
    if publish is not None:
        from edge_client.apps.watch.home_assistant import Sensor
        from edge_client.store.stored_values import DeviceName
        from protocol.mqtt.tls import parse_brokers, warnings

        access, name = read_access(**access_given, prefix=_PREFIX), sensor or folder.resolve().name
        broker = parse_brokers(publish, tls=access.tls)
        for warning in warnings(access, broker):
            log.warning("%s", warning)
        opened = Sensor(broker, access, device=store.get(DeviceName).value, name=name, folder=folder)
        output = published(output, opened)
    if agree is not None:
        output = changes_only(output, Majority(*agree))
    heads = HeadInUse(store, provider=provider, threads=threads, prior=prior, min_probability=min_probability)
    watch = FolderWatch(folder, existing=existing)
    stop_on_terminate()
    event(log, logging.INFO, "watching", folder=folder)
    with closing(opened) if opened else nullcontext():
        if opened is not None:
            with suppress(ProtofleetError):  # the first answer announces it, too
                opened.announce(heads.follow().installed.classes)
        while True:
            with suppress(ProtofleetError):  # as long as there is no head that works, which is logged
                classify_new(watch, heads.follow(), top=top, output=output)
            time.sleep(pause_s(watch.scan_s))


def pause_s(scan_s: float) -> float:
    """Return the seconds until the next search of the folder, after one of `scan_s`."""
    return max(INTERVAL_S, scan_s / MAX_LOAD)


def published(output: Print, sensor: "Sensor") -> Print:
    """Return a function that prints predictions, and publishes them."""
    from edge_client.images.extraction import Refusal

    def publish(path: Path, prediction: "Prediction | Refusal", head: "InstalledHead") -> None:
        output(path, prediction, head)
        if not isinstance(prediction, Refusal):
            sensor.publish(prediction, head.classes)

    return publish


def changes_only(output: Print, state: "Majority") -> Print:
    """Return a function that prints the predictions that change the state, and errors."""
    from edge_client.images.extraction import Refusal

    def print_change(path: Path, prediction: "Prediction | Refusal", head: "InstalledHead") -> None:
        if isinstance(prediction, Refusal) or state.changes(prediction.answer):
            output(path, prediction, head)

    return print_change


def classify_new(watch: "FolderWatch", classifier: "Classifier", *, top: int, output: Print) -> None:
    """Print a prediction for each image that is ready, and an error for one that stays unusable.

    An image on which the backbone or the head fails is tried again later, and does not hold up the others.
    """
    from edge_client.images.extraction import Refusal
    from protocol.log import event

    def classify(paths: list[Path]) -> None:
        for path, prediction in classifier.predict(paths, top=top):
            del rest[path]
            if watch.done(path, failed=isinstance(prediction, Refusal)):
                output(path, prediction, classifier.installed)

    rest, failed, reason = dict.fromkeys(watch.poll()), list[Path](), ""
    with suppress(ProtofleetError):
        classify(list(rest))
    for path in list(rest):  # the backbone or the head fails on one of them, or on all
        try:
            classify([path])
        except ProtofleetError as error:
            failed, reason = [*failed, path], str(error)
    if failed:
        text = "images not classified"
        event(log, logging.ERROR, text, images=len(failed), reason=reason, retry_s=watch.retry(failed))
