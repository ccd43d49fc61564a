"""PyTorch's exporter for tests that export many graphs."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from torch.onnx._internal.exporter._registration import ONNXRegistry

_listed = staticmethod(functools.cache(ONNXRegistry.from_torchlib))


@contextmanager
def listed_operators() -> Iterator[None]:
    """Let the exporter list PyTorch's operators for the first graph only, which takes a third of the time."""
    with patch.object(ONNXRegistry, "from_torchlib", _listed):
        yield


@pytest.fixture(scope="package", autouse=True)
def operators_are_listed_once() -> Iterator[None]:
    """Export the graphs of a package's tests with `listed_operators`."""
    with listed_operators():
        yield
