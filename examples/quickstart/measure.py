"""Accuracy that each device would reach without the others."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.head import logits_of
from aggregator.algorithms.fedtc.train_head import train_head
from aggregator.config.task_file import load_task
from aggregator.ingest.validation import Prototypes
from aggregator.storage.store import Store
from aggregator.training.head_job import recipe_of
from edge_client.data.images import decode as decode_image
from edge_client.runtime.backbone import open_backbone
from examples.quickstart.digits import CLASSES
from examples.quickstart.folder import Folder
from protocol.preprocessing import preprocess
from protocol.storage.blobstore import BlobStore
from protocol.wire.codec import decode, to_array
from protocol.wire.messages import Submission


def accuracy_alone(folder: Folder, on_device: Callable[[str], None]) -> dict[str, float]:
    """Return the accuracy on the held-out images that each device would reach without the others.

    The folder is that of a fleet that has its head; `on_device` is called with each device before its training.
    """
    task, (backbone,) = load_task(folder.task)
    features, labels = held_out_features(folder, backbone)
    scores = {}
    for device, sent in submissions(folder).items():
        on_device(device)
        trained = train_head(
            sent.values,
            sent.labels,
            sent.counts,
            num_classes=len(CLASSES),
            recipe=recipe_of(task.training),
            seed=task.training.seed,
            device="cpu",
        )
        predicted = logits_of(trained.layers, features).argmax(axis=1)
        scores[device] = float((predicted == labels).mean())
    return scores


def held_out_features(folder: Folder, backbone: Path) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
    """Return features (n, L) and classes (n,) of the images that no device has, by the device's functions."""
    network = open_backbone(backbone, provider="cpu")
    paths = folder.held_out_images()
    images = np.stack([preprocess(decode_image(path), network.metadata.preprocessing) for path in paths])
    labels = np.array([CLASSES.index(path.parent.name) for path in paths])
    return network.features(images), labels


def submissions(folder: Folder) -> dict[str, Prototypes]:
    """Return the newest head's training data by device, from the aggregator's state."""
    store = Store(folder.aggregator, read_only=True)
    members = store.heads.all(store.served_task().digest)[-1].members
    store.close()
    blobs = BlobStore(folder.aggregator / "blobs")
    found = {}
    for device, digest in sorted(members.items()):
        payload = blobs.read(bytes.fromhex(digest))
        message = decode(payload, Submission, max_bytes=len(payload))
        values = to_array(message.prototypes).astype(np.float32)
        found[device] = Prototypes(values, to_array(message.labels), to_array(message.counts))
    return found
