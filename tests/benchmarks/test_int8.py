"""`python -m benchmarks device int8` compares a network in both precisions."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from PIL import Image

from benchmarks.data import features
from benchmarks.data.images import DataSet, Labeled
from benchmarks.device.int8 import command
from edge_client.runtime.backbone import open_backbone
from export.to_onnx import export_module
from tests.support.graphs.torch_networks import described, tiny_network


def smooth(index: int) -> Image.Image:
    grid = np.random.default_rng(index).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(grid).resize((48, 48), Image.Resampling.BICUBIC)


def test_row_of_a_network(tmp_path: Path) -> None:
    photos, file = tmp_path / "photos", tmp_path / "int8.json"
    photos.mkdir()
    for index in range(10):
        smooth(index).save(photos / f"{index}.png")
    options = ["--network", "test_resnet", "--image-size", "48", "--photos", str(photos)]
    done = CliRunner().invoke(command, [*options, "--repetitions", "2", "--json", str(file)])
    assert done.exception is None, done.output
    report = json.loads(file.read_text(encoding="utf-8"))
    ((row,),) = (table["rows"] for table in report["tables"])
    cells = dict(zip(report["tables"][0]["columns"], row, strict=True))
    assert (cells["network"], cells["size"]) == ("test_resnet", "48")
    assert 0.9 < float(cells["worst cosine"]) <= float(cells["median"])
    assert {name: len(turns) for name, turns in report["seconds_of_a_batch"]["test_resnet-48"].items()} == {
        "float32": 2,
        "int8": 2,
    }


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
