"""The programs in docs/model-onnx.md compute from model.onnx alone what `edge-client predict` computes."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import ExifTags, Image

from aggregator.algorithms.fedtc.head import Dense
from aggregator.graphs.fused_model import fuse
from aggregator.graphs.head_export import head_to_onnx
from edge_client.graphs.backbone import open_backbone
from edge_client.heads.head import open_head
from protocol.models.preprocessing import Preprocessing
from tests.support.devices.device_factory import classifier
from tests.support.graphs.backbones import tiny_backbone
from tests.support.graphs.heads import head_metadata

PAGE = (Path(__file__).parents[2] / "docs" / "model-onnx.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"(?ms)^```(\w+)\n(.*?)^```", PAGE))
WRITE_METADATA, INSTALL, PREDICT = BLOCKS["console"].replace("venv/bin/", "").splitlines()

CLASSES = ("ant", "honey bee", "Käfer", "dog", "elk")
FEATURE_SIZE = 16
MODELS = {
    "one": [Preprocessing(height=8, width=8)],
    "several": [
        Preprocessing(height=8, width=8),
        Preprocessing(height=12, width=12, crop_pct=0.8, interpolation="bilinear"),
        Preprocessing(height=6, width=10, crop_mode="squash"),
    ],
    "border": [Preprocessing(height=8, width=12, crop_mode="border", fill=(9, 99, 200))],
}

_random = np.random.default_rng(0)
_y, _x = np.mgrid[0:48, 0:96]
IMAGES: dict[str, NDArray[Any]] = {
    "of the input's size": _random.integers(0, 256, (8, 8, 3), dtype=np.uint8),
    "of one color": np.full((16, 32, 3), (250, 120, 10), np.uint8),
    "of another size": _random.integers(0, 256, (50, 72, 3), dtype=np.uint8),
    "smooth": np.stack([2 * _x, 5 * _y, 255 - _x], axis=2).astype(np.uint8),
    "gray": _random.integers(0, 256, (8, 8), dtype=np.uint8),
    "transparent": _random.integers(0, 256, (8, 8, 4), dtype=np.uint8),
    "16-bit": _random.integers(0, 65536, (8, 8), dtype=np.uint16),
    "gray with alpha": _random.integers(0, 256, (8, 8, 2), dtype=np.uint8),
    "smooth with alpha": np.stack([2 * _x, 5 * _y, 255 - _x, 5 * _y], axis=2).astype(np.uint8),
}

CONVERTED = ("turned", "CMYK", "palette")
"""Photos of the input's size by `_save_converted`."""

NOT_RESAMPLED = {
    "one": (
        "of one color",
        "of the input's size",
        "gray",
        "transparent",
        "16-bit",
        "gray with alpha",
        *CONVERTED,
    ),
    "several": ("of one color",),
    "border": ("of one color",),
}
"""Images for which the filter makes no difference."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each model, a folder with `model.onnx`, its parts and the images."""
    return {name: _write(tmp_path_factory.mktemp(name), specs) for name, specs in MODELS.items()}


def _write(folder: Path, specs: Sequence[Preprocessing]) -> Path:
    files = [
        tiny_backbone(feature_size=FEATURE_SIZE, seed=number, preprocessing=spec)
        for number, spec in enumerate(specs)
    ]
    metadata = head_metadata(*files, classes=CLASSES, feature_size=FEATURE_SIZE * len(files))
    weights = np.random.default_rng(1).normal(size=(len(CLASSES), metadata.feature_size)) * 0.05
    layer = Dense(weights.astype(np.float32), np.zeros(len(CLASSES), np.float32))
    head = head_to_onnx([layer], metadata=metadata)
    for name, data in (("head.onnx", head), ("model.onnx", fuse(files, head))):
        (folder / name).write_bytes(data)
    for number, file in enumerate(files):
        (folder / f"{number}.onnx").write_bytes(file)
    for name, pixels in IMAGES.items():
        Image.fromarray(pixels).save(folder / f"{name}.png")
    _save_converted(folder, Image.fromarray(IMAGES["of the input's size"]))
    return folder


def _save_converted(folder: Path, photo: Image.Image) -> None:
    """Write a photo that lies on its side by its EXIF orientation, one in CMYK, and one with a transparent color."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo.save(folder / "turned.jpg", exif=exif)
    cyan, magenta, yellow = photo.split()
    Image.merge("CMYK", (cyan, magenta, yellow, magenta)).save(folder / "CMYK.jpg")
    photo.quantize(16).save(folder / "palette.png", transparency=3)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a `node_modules` folder with what the JavaScript program needs."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed: apt-get install nodejs npm")
    folder = tmp_path_factory.mktemp("packages")
    settings = ("engine_strict", "ignore_scripts")
    env = os.environ | {f"npm_config_{name}": "true" for name in settings}
    try:
        done = subprocess.run(
            INSTALL.split(), cwd=folder, env=env, timeout=200, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"no answer from the package registry in 200 s: {INSTALL}")
    if done.returncode != 0:
        pytest.skip(f"cannot install the packages: {INSTALL}: {' '.join(done.stderr.split())[:300]}")
    return folder / "node_modules"


def _file(folder: Path, image: str) -> Path:
    (file,) = (file for file in folder.iterdir() if file.stem == image)
    return file


def _prediction(folder: Path, image: str) -> tuple[str, float]:
    """Return the class and its probability as `edge-client predict` finds them."""
    count = len(list(folder.glob("[0-9].onnx")))
    backbones = [open_backbone(folder / f"{number}.onnx", provider="cpu") for number in range(count)]
    head = open_head((folder / "head.onnx").read_bytes(), backbones=backbones)
    return classifier(backbones, head).classify(_file(folder, image).read_bytes(), top=1).top[0]


def _compare(printed: str, expected: tuple[str, float], *, tolerance: float = 1e-4) -> None:
    label, probability = printed.strip().rsplit(" ", 1)
    assert label == expected[0]
    assert float(probability) == pytest.approx(expected[1], abs=tolerance)


def _run(arguments: Sequence[str], folder: Path) -> str:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_program_imports_nothing_of_protofleet() -> None:
    """It imports only the packages that the page says to install."""
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(BLOCKS["python"]))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {"json", "sys", "numpy", "onnxruntime", "PIL"}


@pytest.mark.parametrize(
    ("model", "image"),
    [
        ("one", "of the input's size"),
        ("one", "of another size"),
        *(("one", image) for image in ("transparent", "16-bit", "gray with alpha", *CONVERTED)),
        ("several", "of another size"),
        ("border", "smooth"),
    ],
)
def test_python_program_predicts_as_a_device(folders: dict[str, Path], model: str, image: str) -> None:
    folder = folders[model]
    printed = _run([sys.executable, "-c", BLOCKS["python"], _file(folder, image).name], folder)
    _compare(printed, _prediction(folder, image))


@pytest.mark.parametrize("model", MODELS)
def test_javascript_program_predicts_as_a_device(
    folders: dict[str, Path], packages: Path, model: str
) -> None:
    """Exactly, for opaque images that need no resampling; about as exactly as filters are for a photo; not of CMYK."""
    folder = folders[model]
    (folder / "node_modules").symlink_to(packages)
    (folder / PREDICT.split()[1]).write_text(BLOCKS["js"], encoding="utf-8")
    _run(["sh", "-c", WRITE_METADATA], folder)
    exact = dict.fromkeys((image for image in NOT_RESAMPLED[model] if image != "CMYK"), 1e-4)
    mixed = dict.fromkeys({"transparent", "gray with alpha"} & exact.keys(), 2e-3)  # sharp rounds down
    resampled = dict.fromkeys(("smooth", "smooth with alpha"), 1e-2)
    for image, tolerance in {**exact, **mixed, **resampled}.items():
        printed = _run([*PREDICT.split()[:2], _file(folder, image).name], folder)
        _compare(printed, _prediction(folder, image), tolerance=tolerance)
