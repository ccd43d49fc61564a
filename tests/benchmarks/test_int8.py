"""`python -m benchmarks device int8` compares a network in both precisions."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from benchmarks.data import features
from benchmarks.data.images import DataSet, Labeled
from edge_client.runtime.backbone import open_backbone
from export.to_onnx import export_module
from tests.support.graphs.torch_networks import described, tiny_network


def smooth(index: int) -> Image.Image:
    grid = np.random.default_rng(index).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(grid).resize((48, 48), Image.Resampling.BICUBIC)


def test_backbone_is_quantized_once_for_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = tmp_path / "backbone.onnx"
    export_module(tiny_network(), described(), path=graph)
    images = np.stack([np.asarray(smooth(index)) for index in range(12)])
    part = Labeled(images, np.zeros(12, dtype=np.int64))
    monkeypatch.setattr(features, "load_data", {"some": DataSet(part, part)}.pop)
    file = features.quantized_file(graph, data="some")
    assert features.quantized_file(graph, data="some") == file
    assert any(node.op_type == "QuantizeLinear" for node in onnx.load(file).graph.node)
    assert open_backbone(file, provider="cpu", threads=1).metadata.precision == "int8"
