import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from export import cli
from export.backbones import Choice, load_backbone
from export.parity import timm_reference
from export.projection import principal_components, project_features
from protocol.cli import run
from protocol.errors import ConfigError
from protocol.models.onnx_metadata import BackboneMetadata, read_metadata

MODEL = "test_efficientnet"
SIZE = 4


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for index in range(6):
        noise = random.integers(0, 256, (40 + index, 50, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{index}.png")
    return folder


def images(folder: Path) -> list[Image.Image]:
    return [Image.open(path).convert("RGB") for path in sorted(folder.iterdir())]


def test_the_file_has_the_projected_features_and_the_comparison_includes_them(
    tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    options = ["--random", "--image-size", "32", "--crop-pct", "1", "--project", str(SIZE)]
    arguments = [MODEL, *options, "--images", str(photos), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["export-backbone", *arguments])

    with pytest.raises(SystemExit) as ended:
        run(cli.cli, program="export-backbone", extras="export,cpu")

    assert ended.value.code == 0
    session = onnxruntime.InferenceSession(
        tmp_path / f"{MODEL}-32-p{SIZE}.onnx", providers=["CPUExecutionProvider"]
    )
    metadata = read_metadata(session.get_modelmeta().custom_metadata_map, BackboneMetadata)
    assert metadata.feature_size == SIZE
    assert metadata.parity is not None
    assert metadata.parity.cosine > 0.999
    features = session.run(["feature"], {"image": np.zeros((2, 32, 32, 3), np.uint8)})[0]
    assert features.shape == (2, SIZE)


def test_projected_features_are_those_of_the_network_along_their_principal_components(photos: Path) -> None:
    torch.manual_seed(0)
    backbone = load_backbone(Choice(MODEL, random=True, image_size=32))
    own = timm_reference(backbone.module, backbone.config)
    features = np.stack([own(photo) for photo in images(photos)])

    projected = project_features(backbone, SIZE, images(photos))

    directions = principal_components(features, SIZE)
    np.testing.assert_allclose(directions.T @ directions, np.eye(SIZE), atol=1e-5)
    found = timm_reference(projected.module, projected.config)(images(photos)[0])
    np.testing.assert_allclose(found, features[0] @ directions, rtol=1e-4, atol=1e-5)
    scatter = np.linalg.svd(features - features.mean(axis=0), compute_uv=False) ** 2
    along = ((features - features.mean(axis=0)) @ directions) ** 2
    np.testing.assert_allclose(along.sum(axis=0), scatter[:SIZE], rtol=1e-3)


def test_too_few_photos_and_too_many_components_are_refused(photos: Path) -> None:
    backbone = load_backbone(Choice(MODEL, random=True, image_size=32))

    with pytest.raises(ConfigError, match=r"expected more than 6 photos .* got 6"):
        project_features(backbone, 6, images(photos))
    with pytest.raises(ConfigError, match="project them on fewer"):
        project_features(backbone, backbone.metadata.feature_size, images(photos))
