"""`edge-client review`."""

import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_client.cli.options import (
    COUNT,
    FOLDER,
    as_json_text,
    data_option,
    loading_modules,
    open_state,
    provider_option,
    state_options,
    threads_option,
)
from protocol.cli import counted, examples, plain, say, setting
from protocol.errors import ConfigError
from protocol.service_manager import stop_on_terminate

if TYPE_CHECKING:
    from edge_client.apps.review.findings import Finding, Review
    from edge_client.apps.review.relabeling import Relabeling
    from edge_client.graphs.session import Provider
    from edge_client.images.images import LabeledImage


@click.command(
    "review",
    epilog=examples(
        "edge-client review --data /srv/images",
        "edge-client review --data /srv/images --unlabeled /srv/camera --page",
    ),
)
@state_options
@data_option
@provider_option
@threads_option
@setting(
    "--unlabeled",
    type=FOLDER,
    help="Folder of unlabeled images, outside of --data; of none of the classes, too. Nothing of them is uploaded.",
)
@click.option("--limit", type=COUNT, default=50, show_default=True, help="Findings of each kind.")
@click.option("--all", "everything", is_flag=True, help="List images, too, that were kept on the page.")
@click.option(
    "--page", is_flag=True, help="Serve a page on this machine, on which images are moved between classes."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8091, show_default=True, help="Port of the page."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per finding.")
def review_command(  # noqa: PLR0913 - every option of the command line
    *, data: Path, fleet: str, state: Path | None, provider: "Provider", threads: int | None,
    unlabeled: Path | None, limit: int, everything: bool, page: bool, port: int, as_json: bool,
) -> None:  # fmt: skip
    """List labeled images that the installed head finds suspicious.

    With --unlabeled also unlabeled images that are worth a label. The list is for people: correct labels are on it,
    too. With --page, keys move images between the classes' folders; none is deleted or replaced.
    """
    with loading_modules():
        from edge_client.apps.review.findings import review
        from edge_client.apps.review.relabeling import Relabeling
        from edge_client.cli.image_arguments import say_skipped
        from edge_client.graphs.session import require_runtime
        from edge_client.heads.classifier import open_classifier
        from edge_client.images.images import scan_images, unlabeled_below
        from edge_client.progress_bar import Progress
        from edge_client.store.app_files import Kept, read_value, write_value
        from edge_client.store.stored_values import Holdout

        require_runtime()
    store = open_state(state, fleet, read_only=True)
    classifier = open_classifier(store, provider=provider, threads=threads, images=2)
    for note in classifier.notes:
        say(note, err=True)
    classes = classifier.head.classes
    folders = Relabeling(data, classes, unlabeled) if page else None
    scan = scan_images(data, classes)
    for text in scan.unknown:
        say(f"left out: {text}, no class of the head", err=True)
    skipped = Counter(scan.skipped)
    if not scan.images:
        say_skipped(skipped)
        raise ConfigError(
            f"{data} has no image of {', '.join(map(plain, classes))}: one folder for each class"
        )
    images = scan.images
    if unlabeled is not None:
        images += unlabeled_below(unlabeled, data=data, skipped=skipped)
    say_skipped(skipped)
    groups = store.image_groups.read()
    with closing(Progress("Images")) as progress:
        found = review(
            classifier,
            images,
            holdout=store.get(Holdout).fraction,
            grouped=groups.number_of.keys(),
            kept=frozenset() if everything else frozenset(read_value(store.folder, Kept).images),
            cache=store.folder / "features.sqlite",
            limit=limit,
            on_progress=lambda done: progress.update(done, len(images)),
        )
    for path, reason in found.unusable:
        say(f"error: {plain(str(path))}: {reason}", err=True)
    if as_json:
        for finding in found.findings:
            click.echo(as_json_text(finding.fields()))
    else:
        show(found, blocks=len(groups.blocks))
    if folders is not None:

        def keep(image: "LabeledImage") -> None:
            write_value(store.folder, read_value(store.folder, Kept) + image.identity)

        serve(found, folders, keep, classes=classes, has_others=unlabeled is not None, port=port)


def show(found: "Review", *, blocks: int) -> None:
    """Print findings as text, and what moving images does if the device has blocks."""
    from edge_client.apps.review.findings import TITLES

    for kind, title in TITLES.items():
        if findings := found.of_kind(kind):
            total = found.totals[kind]
            say(f"{title}: {total}" + (f", the first {len(findings)}" if len(findings) < total else ""))
            for finding in findings:
                say(f"  {plain(str(finding.image.path))}: {_text(finding)}")
    held_out, correct = found.held_out
    say(
        f"{counted(found.images, 'image')} classified"
        + (f", {correct} of {held_out} held-out images correct" if held_out else "")
    )
    if blocks:
        say(
            f"{counted(blocks, 'block')} uploaded: an image of a block that you move counts in its earlier class until "
            "a quarter of the block, or all of a class in it, was moved"
        )


def _text(finding: "Finding") -> str:
    scores = dict(finding.prediction.top)
    parts = []
    if finding.labeled is not None:
        parts.append(f"labeled {plain(finding.labeled)} ({scores[finding.labeled]:.1%})")
    best = ", ".join(f"{plain(name)} {score:.1%}" for name, score in finding.prediction.top[:2])
    parts.append(f"the head finds {plain(finding.prediction.answer)} ({best})")
    if finding.held_out:
        parts.append("held out")
    if finding.same_as:
        parts.append("the same as " + ", ".join(plain(str(path)) for path in finding.same_as))
    return ", ".join(parts)


def serve(
    found: "Review",
    folders: "Relabeling",
    keep: Callable[["LabeledImage"], None],
    *,
    classes: tuple[str, ...],
    has_others: bool,
    port: int,
) -> None:
    """Serve the page until interrupted."""
    from edge_client.apps.http.options import ServerOptions
    from edge_client.apps.review.server import ReviewServer

    token = secrets.token_urlsafe(16)
    options = ServerOptions(port=port, token=token)
    with ReviewServer(
        options, found, classes=classes, folders=folders, has_others=has_others, keep=keep
    ) as server:
        stop_on_terminate()
        say(
            f"review the images at http://127.0.0.1:{server.server_port}/review#{token}; Ctrl-C ends",
            err=True,
        )
        server.serve_forever()
