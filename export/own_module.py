"""A network of the user's own: a function that `--module package:function` names returns it."""

import importlib
import os
import sys
from typing import Any

import msgspec
import torch
from torch import nn

from export.backbones import (
    Backbone,
    Choice,
    RecordedConfig,
    feature_size_of,
    given_config,
    preprocessing_of,
    weights_digest,
)
from export.to_onnx import first_words
from protocol.errors import ConfigError
from protocol.models.onnx_metadata import BackboneMetadata


def load_module(source: str, choice: Choice) -> Backbone:
    """Return the network that a function `package:function` returns when it is called without arguments.

    The network is a `torch.nn.Module` with its weights, which become float32 on the CPU. It takes images, float32
    (n, 3, H, W) in RGB, normalized by mean and std, to features, float32 (n, L). It may have timm's attribute
    `pretrained_cfg`, a dict with `input_size`, `mean`, `std`, `interpolation`, `crop_pct` and `crop_mode`; the settings
    of `choice` precede it.

    Raises:
        ConfigError: there is no such function, it fails or returns something else, a setting is missing, or the network
            does not support the image size or returns no features.
    """
    name = source.rpartition(":")[2]
    module = _called(source)
    try:
        recorded = msgspec.convert(getattr(module, "pretrained_cfg", {}), RecordedConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"cannot read the attribute pretrained_cfg of {source}: {error}; correct it"
        ) from error
    config, assumed = given_config(source, choice, recorded)
    metadata = BackboneMetadata(
        model=name,
        feature_size=feature_size_of(module, source, config["input_size"], hint="average over positions"),
        preprocessing=preprocessing_of(config),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        weights_sha256=weights_digest(module),
        weights=source,
    )
    return Backbone(module, config, metadata, assumed)


def _called(source: str) -> nn.Module:
    path, colon, name = source.partition(":")
    if not (colon and path and name.isidentifier()):
        raise ConfigError(f"expected --module package:function, got {source!r}")
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - a program that pip installs does not have it there
    try:
        function: Any = getattr(importlib.import_module(path), name)
        module = function()
        if isinstance(module, nn.Module):
            module = module.to("cpu", torch.float32).eval()
    except (Exception, SystemExit) as error:  # a script may end itself
        raise ConfigError(f"cannot call {source}: {type(error).__name__}: {first_words(error)}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module from {source}, got {type(module).__name__}")
    return module
