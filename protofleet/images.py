"""Images as files, Pillow images or arrays, preprocessed for backbones ahead of their use."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from edge_client.images.decoding import decoded, decoding_threads
from protocol.errors import ConfigError, UnreadableImage
from protocol.models.preprocessing import Preprocessing, preprocess

ImageSource: TypeAlias = str | os.PathLike[str] | Image.Image | NDArray[np.uint8]
"""The path of an image file, a Pillow image, or an array uint8 (H, W, 3) in RGB or (H, W) in gray."""

Batch: TypeAlias = Mapping[Preprocessing, NDArray[np.uint8]]
"""Images uint8 (n, H, W, 3), preprocessed in each way that a model's backbones require."""

BATCH_SIZE = 16
"""Images in a run of a backbone."""


def open_image(image: ImageSource) -> AbstractContextManager[Image.Image]:
    """Give any image as a Pillow image, upright by its EXIF orientation.

    Raises:
        UnreadableImage: the file cannot be decoded.
        ConfigError: the array has another dtype or shape.
    """
    if isinstance(image, str | os.PathLike):
        return decoded(Path(image))
    if isinstance(image, Image.Image):
        return nullcontext(ImageOps.exif_transpose(image))
    if image.dtype != np.uint8 or not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)):
        raise ConfigError(f"expected an image as uint8 (H, W, 3) or (H, W), got {image.dtype} {image.shape}")
    return nullcontext(Image.fromarray(np.ascontiguousarray(image)))


def _check(images: Iterable[ImageSource], batch_size: int) -> None:
    if isinstance(images, str | os.PathLike | Image.Image):
        raise ConfigError(f"expected a list of images, got a single one: {images!r}")
    if batch_size < 1:
        raise ConfigError(f"expected a batch_size from 1, got {batch_size}")


def batches(
    images: Iterable[ImageSource],
    specs: Collection[Preprocessing],
    *,
    batch_size: int = BATCH_SIZE,
    on_unreadable: Callable[[int, UnreadableImage], None] | None = None,
) -> Iterator[Batch]:
    """Yield images in batches, in their order; threads decode at most one batch ahead.

    With `on_unreadable`, images that cannot be decoded are left out: it is called with the position and the error of
    each.

    Raises:
        ConfigError: `batch_size` is below 1, or `images` is a single path or image.
        UnreadableImage: an image cannot be decoded or resized, without `on_unreadable`.
    """
    _check(images, batch_size)

    def load(image: ImageSource) -> dict[Preprocessing, NDArray[np.uint8]]:
        with open_image(image) as opened:
            return {spec: preprocess(opened, spec) for spec in specs}

    ahead = enumerate(images)
    waiting: deque[tuple[int, Future[dict[Preprocessing, NDArray[np.uint8]]]]] = deque()
    with ThreadPoolExecutor(decoding_threads(), thread_name_prefix="decode") as pool:
        try:
            while True:
                for number, image in itertools.islice(ahead, 2 * batch_size - len(waiting)):
                    waiting.append((number, pool.submit(load, image)))
                if not waiting:
                    return
                loaded = []
                for _ in range(min(batch_size, len(waiting))):
                    number, future = waiting.popleft()
                    try:
                        loaded.append(future.result())
                    except UnreadableImage as error:
                        if on_unreadable is None:
                            raise
                        on_unreadable(number, error)
                if loaded:
                    yield {spec: np.stack([each[spec] for each in loaded]) for spec in specs}
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
