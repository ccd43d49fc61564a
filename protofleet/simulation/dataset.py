"""Features of a folder of labeled images, as the devices of a fleet would compute them."""

import csv
import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client.graphs.backbone import Backbone
from edge_client.images.extraction import extract
from edge_client.images.images import LabeledImage, scan_images
from edge_client.store.feature_cache import FeatureCache
from protocol.class_folders import class_folders
from protocol.errors import ConfigError
from protocol.models.onnx_metadata import BackboneMetadata
from protofleet.features import AnyBackbone, load_backbones
from protofleet.images import BATCH_SIZE
from protofleet.prototypes import check_rows


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Features with labels, to be divided among simulated devices.

    Attributes:
        features: float32 (n, L).
        labels: int64 (n,), indices into `classes`.
        classes: the C class names.
        domains: names of the places or cameras that the images are from.
        domain_of: int64 (n,), indices into `domains`; None if there is one domain.
        backbone_bytes: size of the files that a device downloads to compute features; 0 if it is unknown.
        unusable: images that were left out, with reasons.
        normalized: True if the backbones have normalized the features, as `export-backbone --layers` makes them do.
        widths: the number of values of each backbone; empty for one.
        layers: the number of values of each layer; empty for one.

    Raises:
        ConfigError: shapes, labels and names do not fit each other.
    """

    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    domains: tuple[str, ...] = ("",)
    domain_of: NDArray[np.int64] | None = None
    backbone_bytes: int = 0
    unusable: tuple[tuple[Path, str], ...] = ()
    normalized: bool = False
    widths: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        labels = np.asarray(self.labels)
        check_rows(np.asarray(self.features), labels)
        shape = (len(self.features),)
        if self.domain_of is not None and self.domain_of.shape != shape:
            raise ConfigError(f"expected the domain of each image, {shape}, got {self.domain_of.shape}")
        missing = set(range(len(self.classes))) ^ set(labels.tolist())
        if missing:
            raise ConfigError(
                f"expected images of each of the {len(self.classes)} classes and no others: check class {min(missing)}"
            )

    @property
    def domain_numbers(self) -> NDArray[np.int64]:
        """`domain_of`, with zeros for one domain."""
        return np.zeros(len(self.labels), np.int64) if self.domain_of is None else self.domain_of


def load_dataset(
    source: str | os.PathLike[str],
    backbone: AnyBackbone | Sequence[AnyBackbone],
    *,
    domains: bool = False,
    per_class: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Dataset:
    """Return the features of labeled images; images that cannot be read are left out.

    Args:
        source: a folder with one sub-folder per class, or a CSV file with the columns path and label, as
            `edge-client --data` takes; with `domains`, a folder of such folders.
        backbone: one or several backbones: files, or what `load_backbone` returned.
        domains: each top-level folder is a domain: a place, or a camera.
        per_class: images of each class of a domain that are used, at most, the same ones every time; None for all.
        cache: folder that keeps the features for the next time; None keeps none.
        on_progress: called with the number of images that are done, and of all images.

    Raises:
        ConfigError: there are no images.
        BackboneMismatch: a file is no backbone.
        StateError: the cache cannot be written.
    """
    backbones = load_backbones(backbone)
    widths = tuple(each.metadata.feature_size for each in backbones)
    parts = _folders(Path(source)) if domains else [Path(source)]
    names = sorted({name for part in parts for name in _classes(part)})
    found = [_sampled(scan_images(part, names).images, per_class) for part in parts]
    total = len(backbones) * sum(map(len, found))
    done, rows, kept, unusable = 0, [], list[list[LabeledImage]](), list[tuple[Path, str]]()

    def advance(known: int, more: int) -> None:
        nonlocal done
        done += known + more
        on_progress(min(done, total), total)

    for part, images in zip(parts, found, strict=True):
        with _opened(cache, part) as features:
            usable, refused = _extract(images, backbones, features, advance)
            digests = [each.sha256 for each in backbones]
            rows.append(features.matrix([image.identity for image in usable], *digests, size=sum(widths)))
        kept.append(usable)
        unusable += refused.items()
    labels = np.array([image.label for images in kept for image in images], np.int64)
    if not len(labels):
        where = " in each folder of a domain" if domains else ""
        raise ConfigError(
            f"no usable images in {source}: expected a folder with one sub-folder of images per class{where}"
        )
    present, numbered = np.unique(labels, return_inverse=True)
    return Dataset(
        features=np.concatenate(rows),
        labels=numbered.astype(np.int64),
        classes=tuple(names[label] for label in present),
        domains=tuple(part.name for part in parts) if domains else ("",),
        domain_of=np.repeat(np.arange(len(parts)), [len(images) for images in kept]) if domains else None,
        backbone_bytes=sum(each.model.size_bytes for each in backbones),
        unusable=tuple(unusable),
        normalized=all(each.metadata.blocks for each in backbones),
        widths=widths,
        layers=tuple(width for each in backbones for width in _layers(each.metadata)),
    )


def _layers(backbone: BackboneMetadata) -> list[int]:
    return [block.width for block in backbone.blocks or ()] or [backbone.feature_size]


def _sampled(images: Sequence[LabeledImage], per_class: int | None) -> list[LabeledImage]:
    """Return at most `per_class` random images of each class, in their order."""
    order = np.random.default_rng(0).permutation(len(images)).tolist()
    taken, rows = Counter[int](), list[int]()
    for row in order:
        if per_class is None or taken[images[row].label] < per_class:
            taken[images[row].label] += 1
            rows.append(row)
    return [images[row] for row in sorted(rows)]


def _folders(source: Path) -> list[Path]:
    try:
        return class_folders(source)
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}") from error


def _classes(source: Path) -> list[str]:
    """Return the names of a folder's sub-folders, or the labels in a CSV file."""
    if not source.is_file():
        return [folder.name for folder in _folders(source)]
    try:
        with source.open(newline="", encoding="utf-8-sig") as file:
            labels = {(row.get("label") or "").strip() for row in csv.DictReader(file)}
    except (OSError, UnicodeError, csv.Error) as error:
        raise ConfigError(f"cannot read {source} as a CSV file in UTF-8: {error}") from error
    return sorted(labels - {""})


@contextmanager
def _opened(cache: str | os.PathLike[str] | None, source: Path) -> Iterator[FeatureCache]:
    """Open the cache of a source's features, in a temporary folder if none is to be kept."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if cache is None else cache)
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:16]
        with closing(FeatureCache(folder / f"features-{name}.sqlite")) as opened:
            yield opened


def _extract(
    images: Sequence[LabeledImage],
    backbones: Sequence[Backbone],
    cache: FeatureCache,
    advance: Callable[[int, int], None],
) -> tuple[list[LabeledImage], dict[Path, str]]:
    """Compute the features that are not in the cache; return the usable images, and the others with reasons."""
    opened = {each.sha256: each for each in backbones}
    made = extract(
        images,
        list(opened),
        cache,
        open_backbone=opened.__getitem__,
        batch_size=BATCH_SIZE,
        on_progress=advance,
    )
    refused = dict(made.refused)
    return [image for image in images if image.path not in refused], refused
