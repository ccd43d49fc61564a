"""`export-backbone` from its command line: results on stdout, one line for an error, no file by halves."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from export import cli, layers, to_onnx
from export.backbones import Choice, load_backbone
from export.parity import timm_reference
from protocol.cli import run
from protocol.models.onnx_metadata import BackboneMetadata, read_metadata
from protocol.storage.blobstore import file_digest

MODEL = "test_efficientnet"


class Printed(NamedTuple):
    out: str
    err: str


Command = Callable[..., Printed]


@pytest.fixture
def export_backbone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command here, where torch is loaded already; it must end with this exit code."""

    def run_here(*arguments: str | Path, code: int = 0) -> Printed:
        monkeypatch.setattr(sys, "argv", ["export-backbone", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run(cli.cli, program="export-backbone", extras="export,cpu")
        assert ended.value.code == code
        return Printed(*capsys.readouterr())

    return run_here


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a small network, made here."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    save_file(timm.create_model(MODEL).state_dict(), path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten smooth photos of several sizes: coarse grids of colors, enlarged."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for index in range(10):
        grid = np.random.default_rng(index).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        size = (64, 64 + 3 * index)
        Image.fromarray(grid).resize(size, Image.Resampling.BICUBIC).save(folder / f"{index}.png")
    return folder


def test_backbone_is_exported_with_json_summary(
    tmp_path: Path, photos: Path, weights: Path, export_backbone: Command
) -> None:
    out = tmp_path / "made" / "here"

    done = export_backbone(
        MODEL, "--weights", weights, "--out", out, "--image-size", "64", "--mean", ".5,.5,.5", "--std", ".5,.4,.3",
        "--model-kwargs", "drop_rate=0.1", "--model-kwargs", "pad_type=same", "--images", photos, "--json",
    )  # fmt: skip

    summary = json.loads(done.out)
    (path,) = out.iterdir()
    assert path.name == f"{MODEL}-64.onnx"
    assert summary["path"] == str(path)
    assert summary["sha256"] == file_digest(path).hex()
    assert summary["size_bytes"] == path.stat().st_size
    assert summary["weights_sha256"] == file_digest(weights).hex()
    assert summary["parity"]["images"] == 10
    assert summary["parity"]["relative_error"] < 1e-3
    assert summary["parity"]["cosine"] > 0.999999
    assert summary["assumed"] == ["interpolation", "crop_pct", "crop_mode"]
    assert {"crop_pct": 0.95, "mean": [0.5, 0.5, 0.5], "padding": "same"}.items() <= summary[
        "preprocessing"
    ].items()
    (warning,) = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert f"{weights} does not record" in warning
    assert (
        "assumed, as for timm's test_efficientnet: interpolation bicubic, crop_pct 0.95, crop_mode center."
        in warning
    )
    session = onnxruntime.InferenceSession(path)
    metadata = read_metadata(session.get_modelmeta().custom_metadata_map, BackboneMetadata)
    assert metadata.std == (0.5, 0.4, 0.3)
    assert metadata.feature_size == summary["feature_size"] == session.get_outputs()[0].shape[1]


@pytest.mark.parametrize(
    ("chosen", "name"),
    [("last", f"{MODEL}-64-last-int8.onnx"), ("c128, c192", f"{MODEL}-64-c128+c192-int8.onnx")],
)
def test_backbone_is_quantized(
    tmp_path: Path, photos: Path, weights: Path, chosen: str, name: str, export_backbone: Command
) -> None:
    out = tmp_path / "out"
    done = export_backbone(
        MODEL, "--weights", weights, "--out", out, "--image-size", "64", "--json", "--images", photos,
        "--precision", "int8", "--float-layer", "blocks.0.0.conv", "--min-cosine", "-1", "--layers", chosen,
    )  # fmt: skip
    summary = json.loads(done.out)
    (path,) = out.iterdir()
    assert path.name == name
    assert summary["precision"] == "int8"
    assert summary["parity"]["images"] == 2
    end = next(node for node in onnx.load(path).graph.node if "feature" in node.output)
    assert (end.op_type == "Concat") == (chosen != "last")  # float32: 8 bits would end with DequantizeLinear
    if chosen != "last":
        assert [block["name"] for block in summary["blocks"]] == ["c128", "c192"]
        assert summary["parity"]["cosine"] > 0.9
    assert "converting" in done.err


@pytest.mark.parametrize("chosen", ["last", "last,blocks.3"])
def test_backbone_is_converted_to_float16(
    tmp_path: Path, photos: Path, weights: Path, chosen: str, export_backbone: Command
) -> None:
    out = tmp_path / "out"
    done = export_backbone(
        MODEL, "--weights", weights, "--out", out, "--image-size", "64", "--json", "--images", photos,
        "--precision", "float16", "--layers", chosen,
    )  # fmt: skip
    summary = json.loads(done.out)
    named = chosen.replace(",", "+")
    assert [path.name for path in out.iterdir()] == [f"{MODEL}-64-{named}-float16.onnx"]
    assert summary["precision"] == "float16"
    assert summary["parity"]["images"] == 10
    assert summary["parity"]["cosine"] > 0.999


def test_default_layers_are_those_that_the_network_has(tmp_path: Path, export_backbone: Command) -> None:
    """The file has its name without layers, and that of depthwise activations ends with the last of them."""
    options = ("--random", "--image-size", "32", "--out", tmp_path, "--json")
    names = {}
    for model in (MODEL, "ese_vovnet19b_slim"):
        done = export_backbone(model, *options)
        names[model] = [block["name"] for block in json.loads(done.out)["blocks"]]
        is_last = f"{model} has no block for --layers depthwise or residual: using last" in done.err
        assert is_last == (not names[model])
        assert (tmp_path / f"{model}-32.onnx").is_file()
    assert names == {MODEL: ["c128", "c192"], "ese_vovnet19b_slim": []}
    tensors = [tensor.name for tensor in onnx.load(tmp_path / f"{MODEL}-32.onnx").graph.initializer]
    assert not any("blocks.4.0.conv_pwl" in name or "conv_head" in name for name in tensors)


def test_the_last_layer_alone_is_the_file_without_layers(
    tmp_path: Path, weights: Path, export_backbone: Command
) -> None:
    """Digests of backbones are in tasks."""
    backbone = load_backbone(Choice(MODEL, weights, image_size=32))
    own = to_onnx.export_module(
        backbone.module,
        backbone.metadata,
        path=tmp_path / "own.onnx",
        reference=timm_reference(backbone.module, backbone.config),
    )
    options = ("--weights", weights, "--out", tmp_path, "--image-size", "32", "--layers", "last", "--json")
    assert json.loads(export_backbone(MODEL, *options).out)["sha256"] == own.sha256
    (properties,) = onnx.load(own.path).metadata_props
    assert list(json.loads(properties.value)) == [
        *("kind", "model", "feature_size", "preprocessing", "mean", "std"),
        *("weights_sha256", "weights", "parity", "precision"),
    ]


def test_layers_are_listed(monkeypatch: pytest.MonkeyPatch, export_backbone: Command) -> None:
    rows = [
        {"name": "c128", "width": 128, "resolution": [2, 2], "size_bytes": 128_000, "time_share": 0.515},
        {"name": "last", "width": 256, "resolution": [], "size_bytes": 1_280_000, "time_share": 1},
    ]
    monkeypatch.setattr(layers, "list_layers", lambda _backbone, **_options: rows)
    arguments = (MODEL, "--random", "--image-size", "32", "--list-layers")
    titles, first, last = map(str.split, export_backbone(*arguments).out.splitlines())
    assert titles == ["block", "width", "resolution", "MB", "time"]
    assert first == ["c128", "128", "2x2", "0.13", "52%"]
    assert last == ["last", "256", "-", "1.28", "100%"]
    assert json.loads(export_backbone(*arguments, "--json").out) == rows


def test_torchvision_of_another_torch_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export_backbone: Command
) -> None:
    """It is pip's result where torch is from PyTorch's index and torchvision is not."""
    reason = "operator torchvision::nms does not exist"
    (tmp_path / "timm.py").write_text(f"raise RuntimeError({reason!r})", encoding="ascii")
    monkeypatch.delitem(sys.modules, "timm")
    monkeypatch.syspath_prepend(tmp_path)
    done = export_backbone(MODEL, "--random", code=1)
    (line,) = done.err.splitlines()
    assert f"was not built for torch {version('torch')} ({reason}): install both from one index" in line


def test_a_network_of_a_function_and_its_file_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export_backbone: Command
) -> None:
    """The summary names the source, and a warning what is assumed of a file without a record."""
    (tmp_path / "cli_networks.py").write_text(
        f"import timm\ndef small():\n    return timm.create_model({MODEL!r}, num_classes=0)\n"
    )
    monkeypatch.chdir(tmp_path)
    done = export_backbone(
        "--module", "cli_networks:small", "--image-size", "32", "--layers", "blocks.3", "--json"
    )
    summary = json.loads(done.out)
    assert (summary["path"], summary["source"], summary["assumed"]) == (
        "small-32-blocks.3.onnx",
        "PyTorch",
        [],
    )

    torch.onnx.export(
        timm.create_model(MODEL, num_classes=0).eval(), (torch.zeros(1, 3, 32, 32),), "net.onnx", dynamo=False
    )
    done = export_backbone("--from-onnx", "net.onnx", "--mean", ".5,.5,.5", "--std", ".2,.2,.2")
    (warning,) = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert (
        "net.onnx does not record how its images were preprocessed; assumed: interpolation bicubic" in warning
    )
    assert done.out.startswith("net-32.onnx\n")
    assert "float32, against net.onnx on 2 photographs" in done.out


def test_text_summary_has_the_parity(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, export_backbone: Command
) -> None:
    """A file that exceeds the tolerance is not written."""
    whole, made = to_onnx.to_onnx, list[bytes]()

    def export_once(*arguments: Any, **options: Any) -> bytes:
        made.append(made[0] if made else whole(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(to_onnx, "to_onnx", export_once)
    arguments = (MODEL, "--weights", weights, "--out", tmp_path)
    assert (
        "differs between ONNX Runtime and PyTorch: expected"
        in export_backbone(*arguments, "--tolerance", "0", code=1).err
    )
    assert list(tmp_path.iterdir()) == []
    printed = export_backbone(*arguments).out
    assert "mean (0.485, 0.456, 0.406), std (0.229, 0.224, 0.225), crop_pct 0.95" in printed
    assert re.search(r"against PyTorch on 2 photographs: worst cosine (1\.0|0\.99999)", printed)
    assert file_digest(tmp_path / f"{MODEL}-160.onnx").hex() in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["test_efficientnett", "--random"], "did you mean test_efficientnet"),
        ([MODEL], "choose the weights"),
        ([MODEL, "--random", "--layers", "last,c13"], "has no block 'c13' for --layers"),
        ([MODEL, "--random", "--layers", "last", "--images", "nowhere"], "no photos in nowhere"),
        (["--list", "nosuchnet*"], "timm has no model like 'nosuchnet*'"),
    ],
)
def test_errors_are_one_line_and_exit_1(
    tmp_path: Path, export_backbone: Command, arguments: list[str], message: str
) -> None:
    done = export_backbone(*arguments, "--out", tmp_path, code=1)
    (line,) = [line for line in done.err.splitlines() if " ..." not in line]
    assert line.startswith("error: ")
    assert message in line
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [MODEL, "--list", "x"],
        [MODEL, "--module", "a:b"],
        ["--module", "a:b", "--from-onnx", "x.onnx"],
        ["--module", "a:b", "--weights", "w"],
        ["--from-onnx", "x.onnx", "--model-kwargs", "a=b"],
        ["--from-onnx", "x.onnx", "--layers", "last"],
        [MODEL, "--random", "--pool"],
        # Values of pixels in 0..255 would make features that no error reveals.
        *(
            [MODEL, f"--mean={value}"]
            for value in ("127,127,127", "0.5,0.5,1.5", "-0.1,0.5,0.5", "nan,0.5,0.5", "0.5")
        ),
        [MODEL, "--std", "127,127,127"],
        [MODEL, "--std", "1,0,1"],
        [MODEL, "--model-kwargs", "pad_type"],
        [MODEL, "--random", "--precision", "int8"],
        [MODEL, "--random", "--layers", "last,"],
        [MODEL, "--random", "--list-layers", "--precision", "float16"],
        [MODEL, "--random", "--float-layer", "conv_stem"],
        [MODEL, "--random", "--min-cosine", "0.9"],
    ],
)
def test_usage_errors_exit_2(export_backbone: Command, arguments: list[str]) -> None:
    assert "Error: " in export_backbone(*arguments, code=2).err


def test_models_are_listed(export_backbone: Command) -> None:
    listed = export_backbone("--list", "test_v*").out.split()
    assert {"test_vit", "test_vit2"} <= set(listed)
    assert json.loads(export_backbone("--list", "test_v*", "--json").out) == listed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("pad_type=same", "same"),
        ("img_size=128", 128),
        ("drop_rate=0.5", 0.5),
        ("norm=None", None),
        ("bias=True", True),
        ("sizes=(1, 2)", (1, 2)),
        ("global_pool=", ""),
        ("name=a=b", "a=b"),
    ],
)
def test_model_arguments_are_parsed_as_literals(text: str, value: object) -> None:
    assert list(cli._keywords((text,)).values()) == [value]


def test_unreachable_hub_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export_backbone: Command
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    done = export_backbone("resnet18", "--pretrained", "--out", out, code=1)
    loading, error = done.err.splitlines()
    assert loading == "loading resnet18 ..."
    assert error.startswith("error: cannot get the weights of resnet18 from the hub")
    assert error.endswith("give the file with --weights")
    assert list(out.iterdir()) == []


def test_help_imports_no_torch() -> None:
    program = (
        "import sys; from export.cli import cli\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'timm', 'onnx', 'onnxruntime', 'sklearn'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--model-kwargs" in done.stdout
