"""Backbones in ONNX Runtime: loaded, refused, and their providers."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import edge_client
from edge_client.runtime.backbone import open_backbone
from edge_client.runtime.session import Provider
from protocol.errors import BackboneMismatch
from protocol.models.onnx_metadata import BackboneMetadata, read_metadata, to_properties
from tests.support.graphs.backbones import changed, tiny_backbone, without_metadata
from tests.support.graphs.hostile_graphs import dropout, random_features


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this runtime has CUDA"
)
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_missing_provider_falls_back_to_the_cpu_with_a_note(tmp_path: Path, provider: Provider) -> None:
    """`auto` gives no note."""
    (tmp_path / "b.onnx").write_bytes(tiny_backbone())
    backbone = open_backbone(tmp_path / "b.onnx", provider=provider, threads=1)
    assert backbone.model.provider == "cpu"
    assert provider in backbone.model.note
    assert "\n" not in backbone.model.note
    assert open_backbone(tmp_path / "b.onnx", provider="auto", threads=1).model.note == ""


@pytest.fixture
def seeming_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime lists CUDA, as its GPU package does on every machine, and leaves it out when it is asked for it."""
    present = onnxruntime.get_available_providers()
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", *present])


@pytest.mark.usefixtures("seeming_cuda")
@pytest.mark.filterwarnings("ignore:Specified provider 'CUDAExecutionProvider':UserWarning")
@pytest.mark.parametrize("provider", ["auto", "cuda", "tensorrt"])
def test_provider_that_onnx_runtime_omits_is_noted(
    tmp_path: Path, provider: Provider, capfd: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime's own messages are suppressed."""
    (tmp_path / "b.onnx").write_bytes(tiny_backbone())
    backbone = open_backbone(tmp_path / "b.onnx", provider=provider, threads=1)
    assert backbone.model.provider == "cpu"
    assert "cuda does not work here" in backbone.model.note
    assert backbone.model.note.endswith("running on cpu")
    assert "\n" not in backbone.model.note
    assert backbone.features(np.zeros((2, 8, 8, 3), dtype=np.uint8)).shape == (2, 16)
    assert capfd.readouterr() == ("", "")


def _rename_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = model.graph.node[0].input[0] = "photo"


def _set_edge(value: onnx.ValueInfoProto, axis: int, edge: int) -> None:
    value.type.tensor_type.shape.dim[axis].dim_value = edge


def _move_data(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    model.graph.initializer[0].external_data.add(key="location", value="../signing.key")


def _state_feature_size(model: onnx.ModelProto, size: int) -> None:
    metadata = read_metadata({entry.key: entry.value for entry in model.metadata_props}, BackboneMetadata)
    helper.set_model_props(model, to_properties(msgspec.structs.replace(metadata, feature_size=size)))


FOREIGN = helper.make_opsetid("com.microsoft", 1)
OTHER_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot load"),
    "text": (b"not an onnx file", "cannot load"),
    "truncated": (tiny_backbone()[:-200], "cannot load"),
    "no metadata": (without_metadata(tiny_backbone()), "metadata"),
    "another input": (changed(tiny_backbone(), _rename_input), "takes photo uint8"),
    "one image at a time": (
        changed(tiny_backbone(), lambda model: _set_edge(model.graph.input[0], 0, 1)),
        r"must take image uint8 \(any, 8, 8, 3\) .* takes image uint8 \(1, 8, 8, 3\)",
    ),
    "another height": (
        changed(tiny_backbone(), lambda model: _set_edge(model.graph.input[0], 1, 9)),
        r"takes image uint8 \(any, 9, 8, 3\)",
    ),
    "another output": (
        changed(tiny_backbone(), lambda model: _set_edge(model.graph.output[0], 1, 15)),
        r"gives feature float32 \(any, any\)",
    ),
    "foreign operators": (
        changed(tiny_backbone(), lambda model: model.opset_import.append(FOREIGN)),
        "ONNX's own operators alone, got some of 'com.microsoft'",
    ),
    "random features": (
        random_features(),
        "the same result at every run, got the random operator RandomUnif",
    ),
    "dropout in training mode": (dropout(), "the same result at every run, got the random operator Dropout"),
    "data in other files": (
        changed(tiny_backbone(), _move_data),
        "one file, got one that keeps tensors in other files",
    ),
    "another size than it says": (
        changed(tiny_backbone(), lambda model: _state_feature_size(model, 15)),
        r"must .* give feature float32 \(any, 15\), but .* gives feature float32 \(any, 16\)",
    ),
}


@pytest.mark.parametrize(("file", "said"), OTHER_FILES.values(), ids=OTHER_FILES)
def test_other_files_are_refused_in_one_line(tmp_path: Path, file: bytes, said: str) -> None:
    path = tmp_path / "b.onnx"
    path.write_bytes(file)
    with pytest.raises(BackboneMismatch, match=said) as caught:
        open_backbone(path, provider="cpu", threads=1)
    assert "\n" not in str(caught.value)


_BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
"""


def test_device_program_imports_no_training_framework() -> None:
    blocked = {"torch", "timm", "onnx", "onnxscript", "scipy", "sklearn", "rich", "amqtt"}
    package = Path(edge_client.__file__).parent
    files = [path.relative_to(package).with_suffix("") for path in package.rglob("[a-z]*.py")]
    modules = {".".join(path.parts) for path in files}
    assert {"cli.run", "training.trainer"} <= modules
    imports = "".join(f"import edge_client.{module}\n" for module in sorted(modules))
    program = _BLOCK.format(blocked=blocked) + imports
    subprocess.run([sys.executable, "-c", program], check=True)
