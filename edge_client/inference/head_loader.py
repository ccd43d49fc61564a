"""The installed head, opened from its stored description."""

from collections.abc import Sequence

from edge_client.inference.predictor import Head, open_head, open_round_head
from edge_client.runtime.backbone import Backbone
from edge_client.storage.stored_values import InstalledHead
from edge_client.training.local_round import read_tensors, unpack
from protocol.storage.blobstore import BlobStore
from protocol.wire.messages import BlobRef


def open_installed(blobs: BlobStore, installed: InstalledHead, backbones: Sequence[Backbone]) -> Head:
    """Open a head; in tasks with rounds, bind it to the round's tensors and the local model.

    Args:
        blobs: has all of its parts.
        installed: its stored description.
        backbones: the task's, for a head without bound tensors.

    Raises:
        BackboneMismatch: it is not for these backbones or classes.
        GraphRefused: it cannot be used.
        StateError: a part of it is missing.
    """
    if not installed.tensors:
        file = blobs.read(installed.head)
        return open_head(file, backbones=backbones, classes=installed.classes)
    local_model = unpack(blobs.read(installed.local_model))
    reference = BlobRef(digest=installed.tensors, size_bytes=0, name="the round's tensors")
    return open_round_head(
        blobs.read(installed.head),
        state=local_model.state,
        tensors=read_tensors(blobs, reference),
        local_prototypes=local_model.prototypes,
        local_counts=local_model.counts,
        feature_size=installed.feature_size,
        classes=installed.classes,
    )
