"""`python -m research principal-prototypes`: what blocks reveal, beside batches of five of the same images."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from aggregator.algorithms.fedtc.adapter import torch_device
from benchmarks.data.features import BackboneType
from benchmarks.options import repeated, selected
from benchmarks.report import Table, json_option, write_json
from research.privacy.blocks import membership, row_decoder, sequences
from research.privacy.blocks.uploads import load_pool

IMAGES = (52, 100, 240, 1000)
PARTS = ("membership", "sequences", "decoder")

MEMBERSHIP = {"images": ">6", "form": "<8", "naive": ">7.1%", "trained": ">8.1%", "members": ">8"}
SEQUENCES = {"images": ">6", "released": "<38", "first of 100": ">13.1%", "leverage": ">9.3f"}
DECODER = {
    "images": ">6", "form": "<25", "vectors": ">8", "R2 linear": ">10.3f", "SSIM": ">6.3f", "R2 network": ">11.3f",
    "SSIM, network": ">14.3f",
}  # fmt: skip


@click.command("principal-prototypes")
@click.option(
    "--data", type=click.Choice(("fashion_mnist", "cifar10")), default="fashion_mnist", show_default=True
)
@click.option("--backbone", type=BackboneType(), default="mobilenetv2_100:c384,c576", show_default=True)
@click.option("--image-size", type=click.IntRange(min=32), default=96, show_default=True)
@click.option(
    "--at-most", type=click.IntRange(min=100), default=20_000, show_default=True, help="Images that are used."
)
@selected("--part", "parts", choices=PARTS)
@repeated("--images", "sizes", type=click.IntRange(min=50), default=IMAGES, help="On a device.")
@click.option("--classes", type=click.IntRange(min=1), default=4, show_default=True, help="On a device.")
@click.option(
    "--members", type=click.IntRange(min=1), default=1_500, show_default=True, help="Attacked images."
)
@click.option(
    "--decoder-epochs", type=click.IntRange(min=0), default=6, show_default=True, help="Of a network."
)
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def command(
    *,
    data: str,
    backbone: str,
    image_size: int,
    at_most: int,
    parts: tuple[str, ...],
    sizes: Sequence[int],
    classes: int,
    members: int,
    decoder_epochs: int,
    seed: int,
    json_file: Path | None,
) -> None:
    """Find out which images are in a block, from one upload and from several, and reconstruct images from its rows.

    `sequences` asks for all layers of the backbone but the last one first, and for all of them later.
    """
    pool = load_pool(data, backbone=backbone, image_size=image_size, at_most=at_most)
    order = np.random.default_rng(seed).permutation(len(pool.labels))
    report: dict[str, Any] = {part: [] for part in parts}
    if "membership" in parts:
        table = Table(MEMBERSHIP, title=f"{data}: the image is first of 100 of its class")
        public, private = pool.part(order[: at_most * 3 // 5]), pool.part(order[at_most * 3 // 5 :])
        for images in sizes:
            for one in membership.measure(
                public, private, images=images, classes=classes, members=members, seed=seed
            ):
                report["membership"].append(asdict(one))
                table.row(one.images, one.form, one.naive, one.trained, one.members)
    if "sequences" in parts:
        table = Table(SEQUENCES, title=f"{data}: share of the image in the span of all that was released")
        for images in sizes:
            for exposed in sequences.measure(
                pool, images=images, classes=classes, members=members, seed=seed
            ):
                report["sequences"].append(asdict(exposed))
                table.row(exposed.images, exposed.released, exposed.first, exposed.leverage)
    if "decoder" in parts:
        table = Table(DECODER, title=f"{data}: reconstructions from one vector")
        public, private = pool.part(order[: at_most // 2]), pool.part(order[at_most // 2 :])
        for images in sizes:
            for shown in row_decoder.measure(
                *(public, private),
                images=images,
                classes=classes,
                epochs=decoder_epochs,
                seed=seed,
                device=torch_device("auto"),
            ):
                report["decoder"].append(asdict(shown))
                table.row(*asdict(shown).values())
    write_json(json_file, "principal-prototypes", data=data, **report)
