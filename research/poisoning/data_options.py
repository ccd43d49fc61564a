"""The options of a command that measures on the features of one data set."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import numpy as np

from benchmarks.data.features import BackboneType, load_features
from benchmarks.options import Option
from protofleet.simulation.fleet import Features


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """A data set and a backbone."""

    data: str
    backbone: str
    image_size: int
    images: int
    """Most images of each part that are used."""
    components: int | None = None
    """Principal components of the training features that are used; None for the features themselves."""

    def load(self) -> Features:
        """Return the features; raises ConfigError like `load_features`."""
        features = load_features(
            self.data, backbone=self.backbone, image_size=self.image_size, at_most=self.images
        )
        return features if self.components is None else _principal(features, self.components)

    def title(self, clients: int) -> str:
        """Return the title of a table about a fleet of so many clients."""
        size = f"{self.image_size}x{self.image_size}"
        components = f", {self.components} components" if self.components else ""
        return f"{self.data}, {self.backbone} at {size}{components}, {clients} clients"


def _principal(features: Features, components: int) -> Features:
    """Return the first principal components of the training features, and the same of the others."""
    mean = features.train.mean(axis=0)
    _, axes = np.linalg.eigh((features.train - mean).T @ (features.train - mean))
    directions = axes[:, -components:]
    return replace(
        features, train=(features.train - mean) @ directions, test=(features.test - mean) @ directions
    )


def data_options(*, names: Sequence[str], images: int) -> Option:
    """Return a decorator that adds the options; the command gets them as `source`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @click.option("--data", type=click.Choice(names), default="fashion_mnist", show_default=True)
        @click.option("--backbone", type=BackboneType(), default="mobilenetv2_100", show_default=True)
        @click.option("--image-size", type=click.IntRange(min=32), default=96, show_default=True)
        @click.option(
            "--images", type=click.IntRange(min=1), default=images, show_default=True, help="Of each part."
        )
        @click.option(
            "--components",
            type=click.IntRange(min=1),
            help="Of the features, the first principal components, which is faster.  [default: the features]",
        )
        @functools.wraps(command)
        def with_source(
            *,
            data: str,
            backbone: str,
            image_size: int,
            images: int,
            components: int | None,
            **others: Any,
        ) -> None:
            source = DataOptions(
                data=data, backbone=backbone, image_size=image_size, images=images, components=components
            )
            command(source=source, **others)

        return with_source

    return decorate
