"""PyTorch's exporter for tests that export many graphs."""

import functools
from collections.abc import Iterator

import pytest
from torch.onnx._internal.exporter._registration import ONNXRegistry


@pytest.fixture(scope="package", autouse=True)
def operators_are_listed_once() -> Iterator[None]:
    """Let the exporter list PyTorch's operators for the first graph only, which takes a third of the time."""
    listed = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", listed)
        yield
