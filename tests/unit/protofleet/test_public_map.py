"""The public map is made by one command from a folder of images."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from protocol.errors import ConfigError, ProtofleetError
from protocol.statistics.public_map import read_map
from protofleet.cli import cli
from protofleet.features import extract_features
from tests.support.fleets.fleet import write_digits
from tests.support.graphs.backbones import tiny_backbone


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli, ["public-map", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_map_is_that_of_all_images_of_all_backbones(tmp_path: Path) -> None:
    images = write_digits(tmp_path / "images", classes=[1, 2], each=20)
    (images / "1" / "broken.png").write_text("broken")
    files = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for seed, file in enumerate(files):
        file.write_bytes(tiny_backbone(feature_size=16, seed=seed))
    out = tmp_path / "public.map"
    said = run(images, "--backbone", files[0], "--backbone", files[1], "--out", out, "--size", 9)
    assert f"image left out: {images / '1' / 'broken.png'}: it is none of JPEG" in said
    assert f"wrote {out}: 32 features to 9 values" in said
    made = read_map(out.read_bytes())
    paths = [each for each in sorted(images.rglob("*.png")) if each.name != "broken.png"]
    np.testing.assert_allclose(made.center, extract_features(paths, files).mean(axis=0), rtol=1e-5, atol=1e-6)


def test_folder_without_enough_images_is_an_error(tmp_path: Path) -> None:
    backbone = tmp_path / "a.onnx"
    backbone.write_bytes(tiny_backbone(feature_size=16))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no usable images"):
        run(tmp_path / "empty", "--backbone", backbone, "--out", tmp_path / "m")
    images = write_digits(tmp_path / "images", classes=[1], each=5)
    with pytest.raises(ProtofleetError, match="expected 1 to 4 components of these 5 images, got 256"):
        run(images, "--backbone", backbone, "--out", tmp_path / "m")
    assert not (tmp_path / "m").exists()
