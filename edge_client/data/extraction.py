"""Images to features: decoded in threads ahead of ONNX Runtime, each of them once, kept as they come.

Memory holds two batches of images, whatever their number.
"""

import itertools
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.data.images import LabeledImage, decode
from edge_client.runtime.backbone import Backbone
from edge_client.runtime.session import release_memory
from edge_client.storage.feature_cache import FeatureCache
from protocol.errors import PrivacyRefused, ProtofleetError, UnreadableImage
from protocol.preprocessing import Preprocessing, preprocess

log = logging.getLogger(__name__)


class Interrupted(ProtofleetError):
    """Extraction was asked to stop; what was computed is kept."""


@dataclass(frozen=True)
class Extraction:
    """How an extraction went; an image counts once for each backbone.

    Args:
        computed: images whose features were computed now.
        cached: images whose features were known.
        refused: images that cannot be used, in order of their paths, and why.
    """

    computed: int
    cached: int
    refused: tuple[tuple[Path, str], ...]


@dataclass(frozen=True)
class Refusal:
    """Why an image cannot be used, and whether that can change while the file does not."""

    reason: str
    may_pass: bool = False


Outcome = tuple[LabeledImage, NDArray[np.float32] | Refusal]
"""An image and its feature, float32 (L1 + ... + LK,) and finite, or why it has none."""

Alter = Callable[[LabeledImage, Preprocessing, NDArray[np.uint8]], NDArray[np.uint8]]
"""What is done to an image's pixels before a backbone sees them."""

_Pixels = dict[Preprocessing, NDArray[np.uint8]]
"""An image, uint8 (H, W, 3), in each of the ways in which a backbone wants it."""

_Loading = tuple[LabeledImage, Future[_Pixels | Refusal]]


def extract(
    images: Sequence[LabeledImage],
    backbone: Backbone,
    cache: FeatureCache,
    *,
    batch_size: int,
    workers: int,
    on_progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> Extraction:
    """Compute the features that the cache has not got, where one backbone is all there is: `extract_all`.

    The cache forgets all other images.
    """
    cache.prune((image.identity for image in images), backbone.sha256)
    return extract_all(
        images,
        [backbone.sha256],
        cache,
        open_backbone=lambda _: backbone,
        batch_size=batch_size,
        workers=workers,
        on_progress=on_progress,
        should_stop=should_stop,
    )


def extract_all(  # noqa: PLR0913 - what is done to images is the ninth thing that features hang on
    images: Sequence[LabeledImage],
    backbones: Sequence[str],
    cache: FeatureCache,
    *,
    open_backbone: Callable[[str], Backbone],
    batch_size: int,
    workers: int,
    on_progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
    alter: tuple[str, Alter] | None = None,
) -> Extraction:
    """Compute the features that the cache has not got, one backbone after the other.

    A refused image is not tried again until its file changes, unless what stood in the way can pass by itself.
    One that is refused for one backbone is left out for those after it.

    Args:
        images: those that features are wanted of; the cache forgets no other one.
        backbones: digests of those in use.
        cache: where the features go, batch by batch.
        open_backbone: opens the backbone of a digest; asked only for one that has something to compute.
        batch_size: images in one run of the backbone.
        workers: threads that decode and preprocess.
        on_progress: called with the number of images done and of all, each counted once a backbone.
        should_stop: asked before every run.
        alter: what is done to the images first, and the tag that tells their features in the cache.

    Raises:
        Interrupted: `should_stop` said so.
        StateError: the features cannot be kept.
        ProtofleetError: the backbone fails.
    """
    tag, change = alter or ("", None)
    refused: dict[Path, str] = {}
    computed = cached = 0
    total = len(backbones) * len(images)
    for number, sha256 in enumerate(backbones):
        rest = [image for image in images if image.path not in refused]
        todo, useless = _sort_out(rest, sha256 + tag, cache)
        refused |= useless
        cached += len(rest) - len(todo) - len(useless)
        done = (number + 1) * len(images) - len(todo)
        on_progress(done, total)
        if not todo:
            continue
        log.info("computing features of %d images, those of %d are known", len(todo), len(rest) - len(todo))
        batches = feature_batches(
            todo,
            [open_backbone(sha256)],
            batch_size=batch_size,
            workers=workers,
            should_stop=should_stop,
            alter=change,
        )
        for batch in batches:
            useless = _keep(batch, sha256 + tag, cache)
            refused |= useless
            computed += len(batch) - len(useless)
            done += len(batch)
            on_progress(done, total)
        release_memory()
    return Extraction(computed=computed, cached=cached, refused=tuple(sorted(refused.items())))


def _sort_out(
    images: Sequence[LabeledImage], backbone: str, cache: FeatureCache
) -> tuple[list[LabeledImage], dict[Path, str]]:
    """Split off the images of which nothing is known, and those that are known to be of no use."""
    todo, refused = [], {}
    for image in images:
        reason = cache.lookup(image.identity, backbone)
        if reason is None:
            todo.append(image)
        elif reason:
            refused[image.path] = reason
    return todo, refused


def _keep(batch: Sequence[Outcome], backbone: str, cache: FeatureCache) -> dict[Path, str]:
    """Put a batch into the cache, but for refusals that can pass; returns which are refused and why."""
    refused = [(image, made) for image, made in batch if isinstance(made, Refusal)]
    cache.put(
        backbone,
        [(image.identity, made) for image, made in batch if not isinstance(made, Refusal)],
        [(image.identity, refusal.reason) for image, refusal in refused if not refusal.may_pass],
    )
    return {image.path: refusal.reason for image, refusal in refused}


def feature_batches(
    images: Iterable[LabeledImage],
    backbones: Sequence[Backbone],
    *,
    batch_size: int,
    workers: int,
    should_stop: Callable[[], bool] = lambda: False,
    alter: Alter | None = None,
) -> Iterator[list[Outcome]]:
    """Compute features batch by batch, in the order of the images, decoding at most two batches ahead.

    Each image is decoded once, and its features from all backbones stand one after the other.

    Raises:
        Interrupted: `should_stop`, asked before every run, said so.
        ProtofleetError: a backbone fails.
    """
    specs = {backbone.metadata.preprocessing for backbone in backbones}
    ahead = iter(images)
    waiting: deque[_Loading] = deque()
    with warnings.catch_warnings(), ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        # Of a broken image Pillow warns in lines of its own; its refusal says the same once.
        warnings.filterwarnings("ignore", module="PIL")
        try:
            while True:
                for image in itertools.islice(ahead, 2 * batch_size - len(waiting)):
                    waiting.append((image, pool.submit(_load, image, specs, alter)))
                if not waiting:
                    return
                if should_stop():
                    raise Interrupted("extraction was interrupted; what was computed is kept")
                yield _compute(backbones, [waiting.popleft() for _ in range(min(batch_size, len(waiting)))])
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _load(image: LabeledImage, specs: Iterable[Preprocessing], alter: Alter | None) -> _Pixels | Refusal:
    """Decode one image, preprocess it in every way that is wanted and alter it, or say why not."""
    path = image.path
    try:
        decoded = decode(path)
        pixels = {spec: preprocess(decoded, spec) for spec in specs}
        return pixels if alter is None else {spec: alter(image, spec, made) for spec, made in pixels.items()}
    except PrivacyRefused:
        raise
    except UnreadableImage as error:
        return Refusal(str(error).removeprefix(f"{path}: "), may_pass=_may_pass(error.__cause__))
    except Exception as error:  # Pillow converts and resizes here, and an image must not end the work
        return Refusal(str(error) or type(error).__name__, may_pass=_may_pass(error))


def _may_pass(cause: BaseException | None) -> bool:
    """Tell a fault of the file from one of the machine: the latter has the system's number, or wants memory."""
    return isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno is not None)


def _compute(backbones: Sequence[Backbone], loading: Sequence[_Loading]) -> list[Outcome]:
    loaded = [(image, future.result()) for image, future in loading]
    pixels = [made for _, made in loaded if not isinstance(made, Refusal)]
    features = iter(_features(backbones, pixels) if pixels else ())
    return [(image, made if isinstance(made, Refusal) else _finite(next(features))) for image, made in loaded]


def _features(backbones: Sequence[Backbone], pixels: Sequence[_Pixels]) -> NDArray[np.float32]:
    """What all backbones make of some images, (n, L1 + ... + LK)."""
    return np.concatenate(
        [
            backbone.features(np.stack([made[backbone.metadata.preprocessing] for made in pixels]))
            for backbone in backbones
        ],
        axis=1,
    )


def _finite(feature: NDArray[np.float32]) -> NDArray[np.float32] | Refusal:
    return feature if np.isfinite(feature).all() else Refusal("the backbone gives NaN or infinity for it")
