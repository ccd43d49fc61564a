"""PyTorch's exporter for tests that export many graphs."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from torch._export.utils import _collect_all_valid_cia_ops
from torch.export import decomp_utils, exported_program
from torch.onnx._internal.exporter._registration import ONNXRegistry

_listed = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
_composite = functools.cache(_collect_all_valid_cia_ops)


@contextmanager
def listed_operators() -> Iterator[None]:
    """Let the exporter list PyTorch's operators for the first graph only, which takes a third of the time."""
    with (
        patch.object(ONNXRegistry, "from_torchlib", _listed),
        patch.object(exported_program, "_collect_all_valid_cia_ops", _composite),
        patch.object(decomp_utils, "_collect_all_valid_cia_ops", _composite),
    ):
        yield


@pytest.fixture(scope="package", autouse=True)
def operators_are_listed_once() -> Iterator[None]:
    """Export the graphs of a package's tests with `listed_operators`."""
    with listed_operators():
        yield
