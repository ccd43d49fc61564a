"""Plots of an attacker's reconstructions, and of the accuracy that privacy costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from research.privacy.decoder import Decoder, decode
from research.privacy.private_fleet import Accuracy
from research.privacy.reconstruction import Form, Scene

SHOWN = 7
"""Classes of a data set that are shown."""


@dataclass(frozen=True)
class Rows:
    """Images of a data set side by side: by title, (SHOWN, H, W) or (SHOWN, H, W, 3)."""

    name: str
    rows: Mapping[str, NDArray[np.float32]]


def rows_of(name: str, scene: Scene, forms: Sequence[Form], decoder: Decoder) -> Rows:
    """Return an image of each class, and the reconstruction from the prototype that it is in, in each form."""
    chosen = [int(scene.device[scene.labels[scene.device] == label][0]) for label in scene.non_members][
        :SHOWN
    ]
    rows = {"image": scene.images[chosen]}
    for form in forms:
        decoded = decode(decoder, form.guess, scene.images.shape[1:])
        gray = np.full_like(decoded[0], 0.5)  # where nothing of a class was sent
        by_image = {
            int(image): decoded[number]
            for number, members in enumerate(form.release.members)
            for image in members
        }
        rows[form.name] = np.stack([by_image.get(image, gray) for image in chosen])
    return Rows(name, rows)


def draw_images(shown: Sequence[Rows], file: Path) -> None:
    """Draw the rows of all data sets beside each other."""
    plt = _pyplot()
    titles = list(shown[0].rows)
    figure, axes = plt.subplots(
        len(titles),
        len(shown),
        figsize=(1.3 + 0.55 * SHOWN * len(shown), 0.62 * len(titles)),
        layout="constrained",
        squeeze=False,
    )
    for column, data in enumerate(shown):
        for row, title in enumerate(titles):
            axis = axes[row][column]
            axis.imshow(np.concatenate(list(data.rows[title]), axis=1), cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_frame_on(False)
            if not column:
                axis.set_ylabel(title, rotation=0, ha="right", va="center", fontsize=8)
        axes[0][column].set_title(data.name, fontsize=9)
    figure.savefig(file, dpi=90)
    plt.close(figure)
    with Image.open(file) as drawn:
        small = drawn.convert("RGB").quantize(128)
    small.save(file, optimize=True)


def draw_accuracies(measured: Mapping[str, Sequence[Accuracy]], file: Path) -> None:
    """Draw accuracy over epsilon, a line for each number of images, and without privacy beside it."""
    plt = _pyplot()
    figure, axes = plt.subplots(
        1, len(measured), figsize=(4.2 * len(measured), 3.4), layout="constrained", squeeze=False
    )
    for axis, (name, rows) in zip(axes[0], measured.items(), strict=True):
        for number, images in enumerate(sorted({row.images for row in rows})):
            mine = [row for row in rows if row.images == images]
            private = [row for row in mine if row.epsilon is not None]
            color = f"C{number}"
            axis.plot(
                [row.epsilon for row in private],
                [100 * row.accuracy for row in private],
                color=color,
                marker="o",
                label=f"{images} images of a class on a device",
            )
            for row in mine:
                if row.protection == "none" and row.batch == max(other.batch for other in mine):
                    axis.axhline(100 * row.accuracy, color=color, linestyle="--", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 2, 4, 8, 16, 32], labels=["1", "2", "4", "8", "16", "32"])
        axis.set_xlabel("epsilon of one submission, delta 1e-5")
        axis.set_title(name, fontsize=9)
        axis.grid(visible=True, linewidth=0.3)
    axes[0][0].set_ylabel("top-1, %  (dashed: without privacy)")
    axes[0][0].legend(fontsize=7)
    figure.savefig(file, dpi=90)
    plt.close(figure)


def _pyplot() -> ModuleType:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
