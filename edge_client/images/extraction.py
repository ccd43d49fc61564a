"""Images to features: decoded in threads ahead of ONNX Runtime, batch by batch.

Memory holds two batches of preprocessed images, however many there are, and images that are decoded: one large one at
a time, and no more than there is memory for.
"""

import contextlib
import itertools
import logging
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edge_client.graphs.backbone import Backbone
from edge_client.images.decoding import decode, decoded, decoding_threads, has_other_pixels, pixel_digest
from edge_client.images.decoding_memory import limit_bytes
from edge_client.images.images import LabeledImage
from edge_client.store.culprits import Culprits
from edge_client.store.feature_cache import FeatureCache
from protocol.errors import PrivacyRefused, ProtofleetError, StateError, UnreadableImage
from protocol.log import event
from protocol.models.preprocessing import Preprocessing, preprocess

log = logging.getLogger(__name__)


ISOLATED = "+isolated"
"""The cache's tag of features that were computed in isolation."""


_HEADERS = 1000
"""Headers of images that are read at once."""


@dataclass(frozen=True)
class Extraction:
    """The result of an extraction; an image counts once for each backbone."""

    computed: int
    """Images whose features were computed."""
    cached: int
    """Images whose features were in the cache."""
    refused: tuple[tuple[Path, str], ...]
    """Unusable images with reasons, in order of their paths."""
    may_pass: bool = False
    """True if some of these may be usable later, although their files do not change."""


@dataclass(frozen=True)
class Refusal:
    """The reason why an image is unusable, and whether that can change although the file does not."""

    reason: str
    may_pass: bool = False


Outcome = tuple[LabeledImage, NDArray[np.float32] | Refusal]
"""An image and its feature, float32 (L1 + ... + LK,) and finite, or the reason why it has none."""

Alter = Callable[[LabeledImage, Preprocessing, NDArray[np.uint8]], NDArray[np.uint8]]
"""A change to an image's pixels before a backbone sees them."""


Isolate = Callable[[Backbone], AbstractContextManager[Backbone]]
"""Gives a backbone that runs on one image at a time, in a process of its own."""

Pixels = dict[Preprocessing, NDArray[np.uint8]]
"""An image, uint8 (H, W, 3), preprocessed for each backbone."""

Digests = dict[str, bytes]
"""`pixel_digest` of images by their identities."""

Decode = Callable[[LabeledImage, Iterable[Preprocessing], Alter | None, Digests | None], Pixels | Refusal]
"""`pixels_of`, or what does the same in other processes."""

IsolateBoth = Callable[[Backbone], AbstractContextManager[tuple[Backbone, Decode]]]
"""Gives a backbone as `Isolate` does, and what decodes an image for it."""


def extract(  # noqa: PLR0913 - features depend on eight things
    images: Sequence[LabeledImage],
    backbones: Sequence[str],
    cache: FeatureCache,
    *,
    open_backbone: Callable[[str], Backbone],
    batch_size: int,
    on_progress: Callable[[int, int], None],
    culprits: Culprits | None = None,
    alter: tuple[str, Alter] | None = None,
    isolate: IsolateBoth | None = None,
) -> Extraction:
    """Compute the features that are not in the cache, one backbone after the other.

    Before an image's feature, its `pixel_digest` is stored, unless the cache has one of the file already.

    An unusable image is not tried again until its file changes, unless the cause can pass by itself. An image that is
    unusable for one backbone is skipped for those after it. `culprits` are told which images are decoded, and when
    features are on disk; images at which jobs ended are tried again with more memory only.

    `open_backbone` is called with a backbone's digest only if there is something to compute.
    `on_progress(cached, computed)` is called for each backbone with the images that need no computation, then after
    each batch with its images.
    `alter` is a change to the images, and the tag of the changed images' features in the cache.
    With `isolate`, backbones run and images are decoded as it gives them, those first at one of which a job may have
    ended. Where either fails, the image is unusable: no image influences another one's features, nor whether they
    exist.

    Raises:
        StateError: the features cannot be stored; DiskAlmostFull if there is too little space for all of them.
        ProtofleetError: the backbone fails, without `isolate`.
    """
    culprits = culprits or Culprits()
    _forget_changed(images, cache)
    tag, change = alter or (ISOLATED if isolate else "", None)
    refused, known, digests = _crashed(images, culprits), cache.contents(), Digests()
    computed = cached = 0
    may_pass = False
    for sha256 in backbones:
        rest = [image for image in images if image.path not in refused]
        todo, useless = _missing(rest, cache.states(sha256 + tag), known.keys() | digests.keys())
        refused |= useless
        cached += len(rest) - len(todo) - len(useless)
        on_progress(len(images) - len(todo), 0)
        if not todo:
            continue
        event(log, logging.INFO, "computing features", images=len(todo), cached=len(rest) - len(todo))
        with contextlib.ExitStack() as stack:
            opened = open_backbone(sha256)
            backbone, decode = stack.enter_context(isolate(opened)) if isolate else (opened, None)
            stack.callback(culprits.decoding, (), 0)
            if decode is not None:
                decode_suspects(todo, culprits, decode)
            batches = feature_batches(
                _named(todo, culprits, batch_size),
                [backbone],
                batch_size=batch_size,
                alter=change,
                decode=decode,
                digests=digests,
            )
            left = len(todo)
            cache.require_space(left, backbone.metadata.feature_size)
            for batch in batches:
                cache.require_space(left, backbone.metadata.feature_size)
                left -= len(batch)
                useless = _store(batch, sha256 + tag, digests, cache)
                refused |= useless
                computed += len(batch) - len(useless)
                on_progress(0, len(batch))
                passing = [isinstance(made, Refusal) and made.may_pass for _, made in batch]
                may_pass |= any(passing)
                if not all(passing):
                    culprits.stored()
    return Extraction(computed, cached, refused=tuple(sorted(refused.items())), may_pass=may_pass)


def decode_suspects(images: Sequence[LabeledImage], culprits: Culprits, decode: Decode | None = None) -> None:
    """Decode, one at a time, the images that an extraction was decoding when its job ended.

    An image at which a job ends again is left out by `extract`, until its file changes or there is more memory.
    """
    suspects = [image for image in images if _key(image) in culprits.suspects]
    if not suspects:
        return
    text = "a job ended while images were decoded: decoding them one at a time"
    event(log, logging.WARNING, text, images=len(suspects))
    crashed = _crashed(suspects, culprits)
    for image in suspects:
        if image.path not in crashed:
            culprits.decoding([image.identity], limit_bytes())
            (decode or pixels_of)(image, [Preprocessing(height=224, width=224)], None, {})
        culprits.decoded(image.identity)
    culprits.decoding((), 0)


def _key(image: LabeledImage) -> bytes:
    return image.identity.encode(errors="surrogateescape")


def _forget_changed(images: Sequence[LabeledImage], cache: FeatureCache) -> None:
    """Delete the features of images whose pixels are others in this version of the preprocessing, by their headers.

    Their digests go with them: the image counts as changed, and its difference to the earlier one is not uploaded.
    """
    if not (earlier := cache.of_earlier_preprocessing()):
        return
    found = [image for image in images if image.identity in earlier]
    for start in range(0, len(found), _HEADERS):
        cache.renew({each.identity: has_other_pixels(each.path) for each in found[start : start + _HEADERS]})


def _crashed(images: Sequence[LabeledImage], culprits: Culprits) -> dict[Path, str]:
    """Return the images at which jobs ended with hardly less memory, with the reason to leave them out."""
    reason = "a job ended when it decoded this image: save it anew, with fewer pixels, or delete it"
    limits = {image.path: memory for image in images if (memory := culprits.memory_at(image.identity))}
    most = limit_bytes() if limits else 0
    return {path: reason for path, memory in limits.items() if most < 1.1 * memory}


def _named(images: Sequence[LabeledImage], culprits: Culprits, batch_size: int) -> Iterator[LabeledImage]:
    """Yield images, and name those that may be being decoded: those of the last two batches and the next one."""
    memory = limit_bytes()
    for start in range(0, len(images), batch_size):
        named = images[max(0, start - 2 * batch_size) : start + batch_size]
        culprits.decoding([image.identity for image in named], memory)
        yield from images[start : start + batch_size]


def _missing(
    images: Sequence[LabeledImage], states: Mapping[str, str], digested: Collection[str]
) -> tuple[list[LabeledImage], dict[Path, str]]:
    """Return the images whose features or digests are unknown, and those that are known to be unusable."""
    todo, refused = [], {}
    for image in images:
        reason = states.get(image.identity)
        if reason is None or (not reason and image.identity not in digested):
            todo.append(image)
        elif reason:
            refused[image.path] = reason
    return todo, refused


def _store(batch: Sequence[Outcome], backbone: str, digests: Digests, cache: FeatureCache) -> dict[Path, str]:
    """Store a batch, except for refusals that may pass; return the unusable images with reasons."""
    found = {image.identity: digests[image.identity] for image, _ in batch if image.identity in digests}
    cache.put_contents(found)  # first: no image is grouped without one
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
    alter: Alter | None = None,
    decode: Decode | None = None,
    digests: Digests | None = None,
) -> Iterator[list[Outcome]]:
    """Yield features batch by batch, in the order of the images, decoding at most two batches ahead.

    Each image is decoded once, and its features from all backbones are concatenated. With `decode`, images are decoded
    and backbones run one image at a time, and where one fails, the image has no feature. `digests` gets each image's
    `pixel_digest` as it is decoded.

    Raises:
        ProtofleetError: a backbone fails, without `decode`.
    """
    compute, threads = (_compute_each, 1) if decode else (_compute, decoding_threads())
    specs = {backbone.metadata.preprocessing for backbone in backbones}
    ahead = iter(images)
    waiting: deque[tuple[LabeledImage, Future[Pixels | Refusal]]] = deque()
    with (
        warnings.catch_warnings(),
        ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool,
    ):
        # Pillow's warnings about a broken image repeat the reason of its refusal.
        warnings.filterwarnings("ignore", module="PIL")
        try:
            while True:
                for image in itertools.islice(ahead, 2 * batch_size - len(waiting)):
                    waiting.append((image, pool.submit(decode or pixels_of, image, specs, alter, digests)))
                if not waiting:
                    return
                batch = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
                yield compute(backbones, ((image, loading.result()) for image, loading in batch))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def first_readable(paths: Iterable[Path]) -> Image.Image | None:
    """Return the first image that can be decoded; None if there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        for path in paths:
            with contextlib.suppress(UnreadableImage):
                return decode(path)
    return None


def feature_of(image: Image.Image | bytes, backbones: Sequence[Backbone]) -> NDArray[np.float32] | Refusal:
    """Return the feature of an image, decoded or as its file's bytes: float32 (L1 + ... + LK,), or why it has none.

    Raises:
        ProtofleetError: a backbone fails.
    """
    try:
        specs = {backbone.metadata.preprocessing for backbone in backbones}
        with decoded(image) if isinstance(image, bytes) else nullcontext(image) as opened:
            pixels = {spec: preprocess(opened, spec) for spec in specs}
    except Exception as error:  # as in `pixels_of`
        return Refusal(str(error) or type(error).__name__)
    return _finite(_features(backbones, [pixels])[0])


def pixels_of(
    image: LabeledImage, specs: Iterable[Preprocessing], alter: Alter | None, digests: Digests | None
) -> Pixels | Refusal:
    """Return an image as each backbone gets it, or why it is unusable; `digests` gets its `pixel_digest`.

    Raises:
        PrivacyRefused: the device has no secret for `alter`.
    """
    path = image.path
    try:
        with decoded(path) as opened:
            if not image.is_unchanged():
                # Its feature would be stored as that of the file that was found.
                return Refusal("it was changed while it was read", may_pass=True)
            if digests is not None:
                digests[image.identity] = pixel_digest(opened)
            pixels = {spec: preprocess(opened, spec) for spec in specs}
        return pixels if alter is None else {spec: alter(image, spec, made) for spec, made in pixels.items()}
    except PrivacyRefused:
        raise
    except UnreadableImage as error:
        return Refusal(str(error).removeprefix(f"{path}: "), may_pass=_may_pass(error.__cause__))
    except Exception as error:  # Pillow converts and resizes here, and an image must not end the extraction
        return Refusal(str(error) or type(error).__name__, may_pass=_may_pass(error))


def _may_pass(cause: BaseException | None) -> bool:
    """Distinguish faults of the machine, which have an errno or are about memory, from faults of the file."""
    return isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno is not None)


def _compute(
    backbones: Sequence[Backbone], loading: Iterable[tuple[LabeledImage, Pixels | Refusal]]
) -> list[Outcome]:
    loaded = [*loading]
    pixels = [made for _, made in loaded if not isinstance(made, Refusal)]
    features = iter(_features(backbones, pixels) if pixels else ())
    return [(image, made if isinstance(made, Refusal) else _finite(next(features))) for image, made in loaded]


def _compute_each(
    backbones: Sequence[Backbone], loading: Iterable[tuple[LabeledImage, Pixels | Refusal]]
) -> list[Outcome]:
    """Compute each image by itself while the next one is decoded; a failure of a backbone is the image's."""
    computed: list[Outcome] = []
    for image, made in loading:
        try:
            outcome = made if isinstance(made, Refusal) else _finite(_features(backbones, [made])[0])
        except StateError:
            raise  # no fault of the image
        except ProtofleetError as error:
            outcome = Refusal(str(error))
        computed.append((image, outcome))
    return computed


def _features(backbones: Sequence[Backbone], pixels: Sequence[Pixels]) -> NDArray[np.float32]:
    parts = [
        backbone.features(np.stack([made[backbone.metadata.preprocessing] for made in pixels]))
        for backbone in backbones
    ]
    return np.concatenate(parts, axis=1)


def _finite(feature: NDArray[np.float32]) -> NDArray[np.float32] | Refusal:
    return feature if np.isfinite(feature).all() else Refusal("the backbone gives NaN or infinity for it")
