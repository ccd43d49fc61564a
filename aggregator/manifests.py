"""What the fleet is told, of what the task file and the store say."""

from aggregator.config import TaskFile
from aggregator.store import HeadRow
from protocol.codec import encode
from protocol.errors import ConfigError
from protocol.messages import MAX_MANIFEST_BYTES, BlobRef, HeadManifest, TaskManifest


def task_manifest(task: TaskFile, backbone: BlobRef) -> TaskManifest:
    """What the fleet is told of a task file.

    Raises:
        ConfigError: it is larger than one message may be.
    """
    manifest = TaskManifest(
        fleet=task.fleet,
        algorithm=task.algorithm,
        classes=task.classes,
        backbones=(backbone,),
        alpha=task.client.alpha,
        batch_size=task.client.batch_size,
        min_images=task.client.min_images,
        seed=task.client.seed,
    )
    size = len(encode(manifest))
    if size > MAX_MANIFEST_BYTES:
        raise ConfigError(f"the class names make a manifest of {size} bytes, more than {MAX_MANIFEST_BYTES}")
    return manifest


def head_manifest(row: HeadRow) -> HeadManifest:
    """What the fleet is told of a head."""
    return HeadManifest(
        task=row.task,
        version=row.version,
        head=BlobRef(digest=row.digest, size_bytes=row.size_bytes, name=f"head-{row.version}.onnx"),
        devices=len(row.members),
        prototypes=row.prototypes,
        metrics=dict(row.metrics),
    )
