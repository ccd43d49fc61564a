"""The tiny network as an ONNX file."""

import pytest

pytest.importorskip(
    "torch"
)  # before the imports of it; a hook of tests/conftest.py gets no report of this file

from export.to_onnx import to_onnx
from tests.support.graphs.torch_networks import described, operators_are_listed_once, tiny_network

__all__ = ["operators_are_listed_once"]


@pytest.fixture(scope="package")
def tiny_file() -> bytes:
    return to_onnx(tiny_network(), described())
