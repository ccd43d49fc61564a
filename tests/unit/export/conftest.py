"""The tiny network as an ONNX file."""

import pytest

from export.to_onnx import to_onnx
from tests.support.networks import described, tiny_network
from tests.support.onnx_exporter import operators_are_listed_once

__all__ = ["operators_are_listed_once"]


@pytest.fixture(scope="package")
def tiny_file() -> bytes:
    return to_onnx(tiny_network(), described())
