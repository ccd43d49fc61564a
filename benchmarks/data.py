"""Public data sets from the folder of real data, as arrays of pictures."""

import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protocol.errors import ConfigError

ROOT = Path(__file__).parents[1]
NAMES = ("mnist", "fashion_mnist", "cifar10")


@dataclass(frozen=True)
class Labelled:
    """Pictures (n, H, W) grey or (n, H, W, 3) RGB, uint8, and their classes (n,) int64."""

    pictures: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class DataSet:
    """What the devices share out, and what their head is judged on."""

    train: Labelled
    test: Labelled


def data_folder() -> Path:
    """Return where the data sets lie: PROTOFLEET_BENCH_DATA, or ../shared/data beside the repository."""
    return Path(os.environ.get("PROTOFLEET_BENCH_DATA", ROOT.parent / "shared" / "data"))


def weights_folder() -> Path:
    """Return where weights lie: PROTOFLEET_BENCH_WEIGHTS, or ../shared/weights beside the repository."""
    return Path(os.environ.get("PROTOFLEET_BENCH_WEIGHTS", ROOT.parent / "shared" / "weights"))


def load_data(name: str) -> DataSet:
    """Load one of NAMES.

    Raises:
        ConfigError: it is not in the data folder.
    """
    path = data_folder() / ("cifar10.zip" if name == "cifar10" else f"{name}.npz")
    if not path.is_file():
        raise ConfigError(
            f"no {path}: put it there, or point PROTOFLEET_BENCH_DATA at the folder that has it"
        )
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            return DataSet(_unzip(archive, "train"), _unzip(archive, "test"))
    with np.load(path) as arrays:
        return DataSet(
            *(
                Labelled(arrays[f"x_{part}"], arrays[f"y_{part}"].astype(np.int64))
                for part in ("train", "test")
            )
        )


def _unzip(archive: zipfile.ZipFile, part: str) -> Labelled:
    """Decode `part/class/*.jpg`; classes are numbered in the order of their names."""
    names = sorted(
        name for name in archive.namelist() if name.startswith(f"{part}/") and name.endswith(".jpg")
    )
    folders = [name.split("/")[1] for name in names]
    pictures = [np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB")) for name in names]
    return Labelled(np.stack(pictures), np.unique(folders, return_inverse=True)[1].astype(np.int64))
