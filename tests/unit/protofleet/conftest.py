"""Handwritten digits on a few devices, and a small backbone."""

from pathlib import Path

import pytest

from tests.support.fleets.fleet import write_digits
from tests.support.graphs.backbones import tiny_backbone

CLASSES = ("0", "1", "2", "3")


@pytest.fixture(scope="session")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a backbone."""
    file = tmp_path_factory.mktemp("backbone") / "backbone.onnx"
    file.write_bytes(tiny_backbone())
    return file


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 40 images of each of CLASSES."""
    return write_digits(tmp_path_factory.mktemp("photos"), classes=[0, 1, 2, 3], each=40)
