"""Backbones in ONNX Runtime: what is loaded, what is refused, and on what they run."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from edge_client.backbone import open_backbone
from protocol.blobstore import file_digest
from protocol.errors import BackboneMismatch
from tests.edge_client.made import tiny
from tests.graphs import tiny_backbone


def test_backbone_says_what_it_is(tmp_path: Path) -> None:
    """Digest, metadata and provider are the file's and the runtime's own; features are (n, L) for any n."""
    backbone = tiny(tmp_path)
    assert backbone.sha256 == file_digest(tmp_path / "tiny-0.onnx").hex()
    assert backbone.metadata.feature_size == 16
    assert (backbone.provider, backbone.note) == ("cpu", "")
    for count in (1, 5):
        features = backbone.features(np.zeros((count, 8, 8, 3), dtype=np.uint8))
        assert features.shape == (count, 16)
        assert features.dtype == np.float32


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this runtime has CUDA"
)
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_missing_provider_is_told_in_one_line(tmp_path: Path, provider: str) -> None:
    """Where what was asked for is not there, the CPU runs it, and a line says so; auto says nothing."""
    (tmp_path / "b.onnx").write_bytes(tiny_backbone())
    backbone = open_backbone(tmp_path / "b.onnx", provider=provider, threads=1)  # type: ignore[arg-type]
    assert backbone.provider == "cpu"
    assert provider in backbone.note
    assert "\n" not in backbone.note
    assert open_backbone(tmp_path / "b.onnx", provider="auto", threads=1).note == ""


def _without_metadata() -> bytes:
    model = onnx.load_from_string(tiny_backbone())
    del model.metadata_props[:]
    return bytes(model.SerializeToString())


def _with_another_input() -> bytes:
    model = onnx.load_from_string(tiny_backbone())
    model.graph.input[0].name = model.graph.node[0].input[0] = "picture"
    return bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (b"", "cannot load"),
        (b"not an onnx file", "cannot load"),
        (tiny_backbone()[:-200], "cannot load"),
        (_without_metadata(), "metadata"),
        (_with_another_input(), "picture"),
    ],
    ids=["empty", "text", "truncated", "no metadata", "another input"],
)
def test_what_is_no_backbone_is_refused(tmp_path: Path, file: bytes, said: str) -> None:
    """Whatever is not a backbone of ours is refused in one line that says what is wrong."""
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


def test_the_device_program_never_loads_a_training_framework() -> None:
    """Everything of the device program imports with torch, timm, onnx and scipy out of reach."""
    blocked = {"torch", "timm", "onnx", "onnxscript", "scipy", "sklearn", "rich", "amqtt"}
    modules = "backbone cli device events features images predictor prototypes state work worker agent"
    imports = "".join(f"import edge_client.{module}\n" for module in modules.split())
    program = _BLOCK.format(blocked=blocked) + imports
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("arguments", [["--broker", "127.0.0.1"], ["predict", "a.png"]])
def test_without_onnx_runtime_one_line_says_what_to_install(tmp_path: Path, arguments: list[str]) -> None:
    """With neither extra installed, the program ends with what to install."""
    program = _BLOCK.format(blocked={"onnxruntime"}) + (
        f"sys.argv = ['edge-client', *{arguments!r}]\nfrom edge_client.cli import main\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "pip install 'protofleet[cpu]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
