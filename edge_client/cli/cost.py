"""`edge-client cost`: what a backbone costs on this device, without a fleet and a broker."""

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_client.cli.options import (
    backbone_option,
    config_option,
    data_option,
    extraction_options,
    loading_modules,
)
from protocol.class_folders import class_folders
from protocol.cli import examples, say, start_logging, verbose_option
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from edge_client.store.job_folder import Shown


@click.command(
    "cost",
    epilog=examples("edge-client cost --backbone backbone.onnx --data /srv/images"),
)
@config_option
@backbone_option
@data_option
@extraction_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@verbose_option
def cost_command(*, backbone: tuple[Path, ...], as_json: bool, verbose: bool, **options: Any) -> None:
    """Measure the time, memory and upload of backbones on this device.

    Builds a submission of the images in a temporary state directory, without a fleet and a broker.
    """
    if not backbone:
        raise click.UsageError("missing backbone: pass --backbone FILE")
    with loading_modules():
        from edge_client.graphs.session import require_runtime

        require_runtime()
    start_logging(verbose=verbose)
    cost = measure(backbones=backbone, **options)
    if as_json:
        click.echo(json.dumps(cost))
        return
    say(f"{cost['seconds_per_image']:.3g} s an image, of {cost['images']}")
    say(f"{cost['memory_mb']:.0f} MB of memory")
    say(f"{cost['upload_bytes']:,} bytes to upload")


def measure(*, data: Path, backbones: Sequence[Path], **options: Any) -> dict[str, Any]:
    """Build a submission from the images with the local backbones, as for a task with default settings.

    It has its own state directory, which is deleted afterwards. `options` are those of `Settings`.

    Returns:
        images: those that were computed.
        seconds_per_image: from the file to the submission, with the opening of the backbones.
        memory_mb: the most memory that the job took; the service beside it takes about 40 MB.
        upload_bytes: size of the submission.

    Raises:
        ProtofleetError: a backbone or the images cannot be used.
    """
    from edge_client.config import Settings
    from edge_client.core.state import Mode, StoredState
    from edge_client.images import file_ages
    from edge_client.service.device import Device
    from edge_client.store.device_state import DeviceState
    from protocol.wire.codec import encode
    from protocol.wire.messages import BlobRef, TaskManifest

    settings = Settings(
        broker=None,
        fleet="cost",
        device_id="cost",
        mode=Mode.DRY_RUN,
        data=data,
        rescan_s=1e9,
        **options,
    )
    shown: list[Shown] = []
    with tempfile.TemporaryDirectory() as folder:
        store = DeviceState(Path(folder) / "state")
        blobs = []
        for path in dict.fromkeys(backbones):
            content = path.read_bytes()
            blobs.append(BlobRef(digest=store.blobs.put(content), size_bytes=len(content), name=path.name))
        # The defaults of a task file's `[client]`.
        manifest = TaskManifest(
            fleet="cost",
            algorithm="fedtc",
            classes=_classes(data),
            backbones=tuple(blobs),
            seed=0,
            alpha=0.99,
            batch_size=5,
            min_images=2,
            prototypes="auto",
        )
        store.set(StoredState(task=store.blobs.put(encode(manifest))))
        # Otherwise a first scan of new images would wait, which is no cost of a backbone.
        time.sleep(file_ages.SETTLE_S)
        Device(settings, store, show=shown.append).run()
        store.close()
    images = sum(entry.images for entry in shown[0].report.classes)
    return {
        "images": images,
        "seconds_per_image": shown[0].seconds / images,
        "memory_mb": shown[0].memory_bytes / 1e6,
        "upload_bytes": shown[0].size_bytes,
    }


def _classes(data: Path) -> tuple[str, ...]:
    """Return the names of the folders of images, or the labels of a CSV file."""
    if not data.exists():
        raise ConfigError(f"no images at {data}: give --data")
    if data.is_dir():
        names = {path.name for path in class_folders(data)}
    else:
        from edge_client.images.images import listed_labels

        names = listed_labels(data)
    if not names:
        raise ConfigError(f"no classes in {data}: expected a directory with one subdirectory per class")
    return tuple(sorted(names))
