"""`edge-client predict`."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_client.cli.options import (
    COUNT,
    as_json_text,
    fleet_option,
    open_state,
    provider_option,
    state_option,
    threads_option,
)
from protocol.cli import say
from protocol.errors import ProtofleetError

if TYPE_CHECKING:
    from edge_client.runtime.session import Provider


@click.command("predict")
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
    store = open_state(state, fleet, read_only=True)
    with suppress(StateError):  # a disk that cannot be written, on which failures of the head are not counted
        store = open_state(state, fleet)
    installed, backbones, head = open_in_use(store, provider=provider, threads=threads)
    for note in {backbone.model.note: None for backbone in backbones if backbone.model.note}:
        say(note, err=True)
    failed = 0
    for prediction in predict(
        images, backbones, head, top=top,
        run_head=partial(store.run_head, installed), run_backbones=partial(store.run_backbones, installed),
    ):  # fmt: skip
        if prediction.error:
            failed += 1
            say(f"error: {prediction.error}", err=True)
        elif as_json:
            scores = dict(prediction.top)
            line = {"image": str(prediction.path), "label": prediction.label, "scores": scores}
            click.echo(as_json_text({**line, "head_version": installed.version, "round": installed.round}))
        else:
            shown = "  ".join(f"{name} {score:.1%}" for name, score in prediction.top)
            say(f"{prediction.path}: {shown}")
    if failed:
        raise ProtofleetError(f"{failed} of {len(images)} images could not be read")
