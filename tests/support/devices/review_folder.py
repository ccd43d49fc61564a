"""A folder of images with a wrong label, a stranger and a duplicate, and a head that knows better."""

import contextlib
import shutil
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.novelty import class_directions
from aggregator.graphs.head_export import head_to_onnx
from edge_client.apps.http.options import ServerOptions
from edge_client.apps.review.findings import Review, review
from edge_client.apps.review.relabeling import Relabeling
from edge_client.apps.review.server import ReviewServer
from edge_client.heads.classifier import Classifier
from edge_client.heads.head import open_head
from edge_client.images.decoding import decode
from edge_client.images.images import LabeledImage, scan_images, unlabeled_below
from protocol.models.preprocessing import preprocess
from tests.support.devices import device_factory
from tests.support.devices.device_factory import CLASSES, image_file, tiny, write_images
from tests.support.graphs.backbones import tiny_backbone
from tests.support.graphs.heads import head_metadata

TOKEN = "the-token"


class ReviewFolder(NamedTuple):
    """Folders of labeled and unlabeled images."""

    folder: Path
    data: Path
    unlabeled: Path
    kept: list[LabeledImage]
    """Images that were kept on the page."""

    def images(self) -> list[LabeledImage]:
        """Return all images, labeled and unlabeled."""
        labeled = scan_images(self.data, CLASSES).images
        return [*labeled, *unlabeled_below(self.unlabeled, data=self.data, skipped=Counter())]

    def review(
        self,
        limit: int = 10,
        cache: Path = Path("none"),
        grouped: Collection[bytes] = (),
        kept: Collection[str] = (),
    ) -> Review:
        """Return the findings; one image of the class `cat` is held out."""
        using = classifier(self.folder)
        return review(using, self.images(), holdout=0.2, grouped=grouped, kept=kept, cache=cache, limit=limit)


def review_folder(folder: Path) -> ReviewFolder:
    """Write images: `cat/wrong.png` is a dog, `cat/stranger.png` neither, and `dog/same.png` the same as one of cat."""
    data, other = write_images(folder / "data", count=4), folder / "unlabeled"
    other.mkdir()
    (data / "dog" / "0003.png").rename(data / "cat" / "wrong.png")
    shutil.copy(data / "cat" / "0000.png", data / "dog" / "same.png")
    image_file(data / "cat" / "stranger.png", Image.new("RGB", (12, 10), (255, 0, 0)))
    (data / "cat" / "0003.png").rename(other / "new.png")
    image_file(other / "between.png", Image.new("RGB", (12, 10), (115, 115, 115)))
    return ReviewFolder(folder, data, other, [])


def head_file(folder: Path) -> bytes:
    """Return the head of the nearest mean of an image of each class; red images are of no known class."""
    backbone = tiny(folder)
    known = write_images(folder / "known", count=1, seed=1)
    pixels = [
        preprocess(decode(known / name / "0000.png"), backbone.metadata.preprocessing) for name in CLASSES
    ]
    means = backbone.features(np.stack(pixels))
    layer = Dense(2 * means, -(means**2).sum(axis=1))
    metadata = head_metadata(tiny_backbone(), classes=CLASSES, novelty_threshold=0.1)
    return head_to_onnx([layer], metadata=metadata, directions=class_directions(means))


def classifier(folder: Path) -> Classifier:
    """Return the head with its backbone."""
    backbone = tiny(folder)
    return device_factory.classifier([backbone], open_head(head_file(folder), backbones=[backbone]))


@contextlib.contextmanager
def review_page(where: ReviewFolder) -> Iterator[ReviewServer]:
    """Serve the page of the findings."""
    folders = Relabeling(where.data, CLASSES, where.unlabeled)
    options = ServerOptions(port=0, token=TOKEN)
    with ReviewServer(
        options, where.review(), classes=CLASSES, folders=folders, has_others=True, keep=where.kept.append
    ) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
