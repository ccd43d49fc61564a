"""Metadata of heads."""

from typing import Any

from msgspec.structs import replace

from protocol.models.onnx_metadata import HeadMetadata
from protocol.wire.codec import digest_of
from tests.support.messages.submissions import FEATURE_SIZE, MANIFEST


def head_metadata(*backbones: bytes, **changes: Any) -> HeadMetadata:
    """Return the metadata of head 1 for the features of these backbones."""
    made = HeadMetadata(
        classes=MANIFEST.classes,
        version=1,
        task="0" * 64,
        backbones=tuple(digest_of(backbone).hex() for backbone in backbones),
        feature_size=FEATURE_SIZE,
        training={},
    )
    return replace(made, **changes)
