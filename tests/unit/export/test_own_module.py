"""`export-backbone --module`: the network that a function returns, or one line that says what is wrong with it."""

import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch

from export.backbones import Choice
from export.own_module import load_module
from export.parity import timm_reference
from export.to_onnx import export_module
from protocol.errors import ConfigError

SETTINGS = Choice("", image_size=16, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of networks."""
    (tmp_path / "own_networks.py").write_text(
        dedent("""
            import torch
            from torch import nn


            def small():
                torch.manual_seed(0)
                return nn.Sequential(nn.Conv2d(3, 5, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout())


            def described():
                network = small()
                network.pretrained_cfg = {
                    "input_size": (3, 24, 24), "mean": (0.4, 0.4, 0.4), "std": (0.3, 0.3, 0.3),
                    "interpolation": "bilinear", "crop_pct": 0.9, "crop_mode": "center", "num_classes": 7,
                }
                return network


            class Described(nn.Sequential):
                def get_extra_state(self):
                    return {"trained": "elsewhere"}


            def half():
                return Described(small()).half()


            def maps():
                return nn.Conv2d(3, 5, 3)


            def failing():
                raise OSError("no weights. And more")


            def ending():
                raise SystemExit("usage: networks.py DATA")


            def wrong():
                network = small()
                network.pretrained_cfg = {"mean": (128, 128, 128)}
                return network


            number = list
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_networks", raising=False)
    return tmp_path


def test_its_network_is_exported_and_compared(folder: Path) -> None:
    """Dropout is off, and the working directory is not left on the path."""
    path = list(sys.path)
    backbone = load_module("own_networks:small", SETTINGS)
    assert sys.path == path
    reference = timm_reference(backbone.module, backbone.config)
    made = export_module(backbone.module, backbone.metadata, path=folder / "small.onnx", reference=reference)
    assert made.metadata.parity is not None
    assert made.metadata.parity.relative_error < 1e-5
    assert (made.metadata.model, made.metadata.weights, made.metadata.feature_size) == (
        *("small", "own_networks:small"), 5
    )  # fmt: skip
    assert backbone.assumed == ("interpolation", "crop_pct", "crop_mode")
    assert load_module("own_networks:small", SETTINGS).metadata == backbone.metadata


@pytest.mark.usefixtures("folder")
def test_its_weights_become_float32() -> None:
    """A state that is no tensor is not digested."""
    backbone = load_module("own_networks:half", SETTINGS)
    assert {parameter.dtype for parameter in backbone.module.parameters()} == {torch.float32}


@pytest.mark.usefixtures("folder")
def test_its_attribute_gives_the_preprocessing() -> None:
    """Options precede it."""
    backbone = load_module("own_networks:described", Choice("", crop_pct=0.5))
    spec = backbone.metadata.preprocessing
    assert (spec.height, spec.width, spec.interpolation, spec.crop_pct) == (24, 24, "bilinear", 0.5)
    np.testing.assert_allclose(backbone.metadata.mean, 0.4)
    assert backbone.assumed == ()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("source", "choice", "error"),
    [
        ("own_networks", SETTINGS, "expected --module package:function, got 'own_networks'"),
        (
            "nowhere:small",
            SETTINGS,
            "cannot call nowhere:small: ModuleNotFoundError: No module named 'nowhere'",
        ),
        ("own_networks:absent", SETTINGS, "cannot call own_networks:absent: AttributeError"),
        ("own_networks:failing", SETTINGS, "cannot call own_networks:failing: OSError: no weights$"),
        ("own_networks:ending", SETTINGS, "cannot call own_networks:ending: SystemExit: usage"),
        ("own_networks:number", SETTINGS, r"expected a torch\.nn\.Module from own_networks:number, got list"),
        (
            "own_networks:maps",
            SETTINGS,
            r"maps returns no pooled feature: .* got \(2, 5, 14, 14\); average over",
        ),
        ("own_networks:small", Choice(""), "is not known: give --image-size, --mean, --std of its training"),
        (
            "own_networks:wrong",
            SETTINGS,
            "cannot read the attribute pretrained_cfg of own_networks:wrong: Expected",
        ),
    ],
)
def test_what_is_wrong_is_named(source: str, choice: Choice, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load_module(source, choice)
