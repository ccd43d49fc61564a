"""The options of a command that measures on the features of one data set."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from benchmarks.data.features import BACKBONES, Features, load_features


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """A data set and a backbone."""

    data: str
    backbone: str
    image_size: int
    images: int
    """Most images of each part that are used."""

    def load(self) -> Features:
        """Return the features; raises ConfigError like `load_features`."""
        return load_features(
            self.data, backbone=self.backbone, image_size=self.image_size, at_most=self.images
        )

    def title(self, clients: int) -> str:
        """Return the title of a table about a fleet of so many clients."""
        return f"{self.data}, {self.backbone} at {self.image_size}x{self.image_size}, {clients} clients"


def data_options(
    *, names: Sequence[str], images: int
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options; the command gets them as `source`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @click.option("--data", type=click.Choice(names), default="fashion_mnist", show_default=True)
        @click.option(
            "--backbone", type=click.Choice(list(BACKBONES)), default="mobilenetv2_100", show_default=True
        )
        @click.option("--image-size", type=click.IntRange(min=32), default=96, show_default=True)
        @click.option(
            "--images", type=click.IntRange(min=1), default=images, show_default=True, help="Of each part."
        )
        @functools.wraps(command)
        def with_source(*, data: str, backbone: str, image_size: int, images: int, **others: Any) -> None:
            source = DataOptions(data=data, backbone=backbone, image_size=image_size, images=images)
            command(source=source, **others)

        return with_source

    return decorate
