"""The public map of differential privacy, made of images that are nobody's secret."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from aggregator.algorithms.statistics.noisy_ridge import make_public_map
from edge_client.images.extraction import feature_batches
from edge_client.images.images import images_below, log_skipped
from protocol.errors import ConfigError
from protocol.statistics.public_map import PublicMap
from protofleet.features import AnyBackbone, load_backbones
from protofleet.images import BATCH_SIZE


def public_map(
    folder: Path,
    backbone: AnyBackbone | Sequence[AnyBackbone],
    *,
    size: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[PublicMap, list[tuple[Path, str]]]:
    """Return the map of `size` principal components of the images in a folder and below it, and unusable files.

    Raises:
        ConfigError: there are no images.
        BackboneMismatch: a file is no backbone.
        ProtofleetError: the images are too few for as many components.
    """
    backbones, skipped = load_backbones(backbone), Counter[str]()
    images = sorted(images_below(folder, skipped), key=lambda image: image.relative)
    log_skipped(skipped, set(), folder)
    rows, unusable, done = [], [], 0
    for batch in feature_batches(images, backbones, batch_size=BATCH_SIZE):
        for image, feature in batch:
            if isinstance(feature, np.ndarray):
                rows.append(feature)
            else:
                unusable.append((image.path, feature.reason))
        done += len(batch)
        on_progress(done, len(images))
    if not rows:
        raise ConfigError(f"no usable images in {folder} or below it")
    return make_public_map(np.stack(rows), size), unusable
