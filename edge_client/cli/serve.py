"""`edge-client serve`."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_client.cli.options import (
    loading_modules,
    open_state,
    prior_option,
    provider_option,
    state_options,
    threads_option,
)
from edge_client.cli.predict import min_probability_option
from protocol.cli import (
    examples,
    given_token,
    setting,
    start_logging,
    verbose_option,
)
from protocol.service_manager import stop_on_terminate

if TYPE_CHECKING:
    from edge_client.graphs.session import Provider
    from edge_client.heads.class_prior import Setting

log = logging.getLogger(__name__)

_MIB = 1024**2


@click.command(
    "serve",
    epilog=examples("edge-client serve", "curl --data-binary @photo.jpg http://127.0.0.1:8090/predict"),
)
@state_options
@provider_option
@threads_option
@prior_option
@min_probability_option
@setting("--http", metavar="HOST:PORT", default="127.0.0.1:8090", help="Address to listen on.")
@setting(
    "--http-token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the token that a prediction requires, in line 1; or set PROTOFLEET_HTTP_TOKEN. Required unless "
    "--http is a loopback address.",
)
@click.option(
    "--max-image-mb", type=click.IntRange(1, 512), default=32, show_default=True,
    help="MiB; a larger image file is refused.",
)  # fmt: skip
@verbose_option
def serve_command(  # noqa: PLR0913 - every option of the command line
    *, fleet: str, state: Path | None, provider: "Provider", threads: int | None, prior: "Setting",
    min_probability: float,
    http: str, http_token_file: Path | None, max_image_mb: int, verbose: bool,
) -> None:  # fmt: skip
    """Answer HTTP requests with predictions of the newest head.

    Runs until interrupted. POST /predict takes an image file as its body, and returns JSON; GET /healthz returns
    200 if there is a head. A head that the device installs is used from the next request on.
    """
    with loading_modules():
        from edge_client.apps.head_in_use import HeadInUse
        from edge_client.apps.http.options import parse_options
        from edge_client.apps.http.server import PredictionServer
        from edge_client.graphs.session import require_runtime
        from protocol.errors import ProtofleetError
        from protocol.log import event

        require_runtime()
    start_logging(verbose=verbose)
    logging.captureWarnings(capture=True)
    logging.getLogger("py.warnings").setLevel(logging.CRITICAL)  # Pillow's repeat the reason of a refusal
    token = given_token(http_token_file, variable="PROTOFLEET_HTTP_TOKEN")
    options = parse_options(http, token=token or None, max_image_bytes=max_image_mb * _MIB)
    store = open_state(state, fleet, read_only=True)
    heads = HeadInUse(store, provider=provider, threads=threads, prior=prior, min_probability=min_probability)
    with PredictionServer(options, heads) as server:
        stop_on_terminate()
        try:
            heads.follow()
        except ProtofleetError as error:
            event(log, logging.WARNING, "no predictions yet", reason=str(error))
        event(log, logging.INFO, "listening", host=options.host, port=server.server_port)
        server.serve_forever()
