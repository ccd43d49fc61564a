"""Pretrained networks from timm, without their classifiers: created, loaded, and described."""

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save
from timm.data import resolve_data_config
from timm.models import load_state_dict
from torch import nn

from protocol.blobstore import file_digest
from protocol.errors import ConfigError
from protocol.preprocessing import Preprocessing

SHOWN_KEYS = 5


@dataclass(frozen=True)
class Choice:
    """Which network with which weights, as the person chose.

    Args:
        model: timm's name of it.
        weights: a safetensors file or a torch checkpoint; None with `pretrained` or `random`.
        pretrained: take timm's own weights from the hub.
        random: take no weights at all.
        model_kwargs: passed to timm as they are.
        image_size: pixels of the square input; the network's own if None.
        mean: overrides the network's own, for pixels scaled to 0..1; so does `std`.
        crop_pct: overrides the network's own.
    """

    model: str
    weights: Path | None = None
    pretrained: bool = False
    random: bool = False
    model_kwargs: Mapping[str, Any] | None = None
    image_size: int | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    crop_pct: float | None = None


@dataclass(frozen=True)
class Backbone:
    """A frozen network and all that has to be known of it.

    Args:
        module: normalised float32 (n, 3, H, W) to float32 (n, L), in evaluation mode.
        config: timm's data config: `input_size`, `interpolation`, `crop_pct`, `crop_mode`, `mean`, `std`.
        weights_sha256: hex digest of the weights file, or of the weights written as safetensors.
        weights: where the weights came from.
    """

    name: str
    module: nn.Module
    config: Mapping[str, Any]
    weights_sha256: str
    weights: str

    @property
    def preprocessing(self) -> Preprocessing:
        """How the device has to prepare pictures for it."""
        _, height, width = self.config["input_size"]
        return Preprocessing(
            height=height,
            width=width,
            crop_pct=self.config["crop_pct"],
            crop_mode=self.config["crop_mode"],
            interpolation=self.config["interpolation"],
        )


def list_models(pattern: str) -> list[str]:
    """Names of the image models of timm that match a shell pattern, or contain the text."""
    found: list[str] = timm.list_models(pattern if "*" in pattern else f"*{pattern}*")
    return found


def load_backbone(choice: Choice) -> Backbone:
    """Create the network that was chosen, with its weights.

    Raises:
        ConfigError: there is no such model, its weights do not fit or cannot be had, or it has no pooled feature.
    """
    if sum((choice.pretrained, choice.weights is not None, choice.random)) != 1:
        raise ConfigError(
            "say where the weights come from: --weights FILE, --pretrained (from the hub), "
            "or --random for a network that has learnt nothing"
        )
    module = _create(choice)
    source = "random"
    if choice.weights is not None:
        _load_weights(module, choice.weights)
        source = choice.weights.name
    elif choice.pretrained:
        source = str(module.pretrained_cfg.get("hf_hub_id") or module.pretrained_cfg.get("url") or "hub")
    digest = file_digest(choice.weights).hex() if choice.weights else _state_digest(module)
    overrides = {"mean": choice.mean, "std": choice.std, "crop_pct": choice.crop_pct}
    size = {"input_size": (3, choice.image_size, choice.image_size)} if choice.image_size else {}
    wanted = {key: value for key, value in overrides.items() if value is not None} | size
    config = resolve_data_config(wanted, model=module)
    backbone = Backbone(choice.model, module.eval(), config, digest, source)
    _check_feature(backbone)
    return backbone


def _create(choice: Choice) -> Any:
    name = choice.model.split(".")[0]
    if name not in timm.list_models():
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "see --list PATTERN"
        raise ConfigError(f"timm has no model {choice.model!r}; {hint}")
    kwargs = dict(choice.model_kwargs or {})
    config = timm.get_pretrained_cfg(choice.model)
    if choice.image_size and config is not None and config.fixed_input_size:
        kwargs.setdefault("img_size", choice.image_size)
    try:
        return timm.create_model(choice.model, pretrained=choice.pretrained, num_classes=0, **kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"timm cannot make {choice.model} of {kwargs}: {error}") from error
    except Exception as error:
        if not choice.pretrained:
            raise ConfigError(f"timm cannot make {choice.model}: {error}") from error
        reason = str(error).strip().splitlines()[0][:200]
        raise ConfigError(
            f"cannot get the weights of {choice.model} from the hub: {reason}; "
            "fetch them where there is a network and give the file with --weights"
        ) from error


def _load_weights(module: Any, path: Path) -> None:
    try:
        state = load_state_dict(str(path), weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"no weights at {path}") from error
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ConfigError(
            f"{path} is neither safetensors nor a torch checkpoint of weights only: {reason}"
        ) from error
    state = {key: value for key, value in state.items() if not _is_classifier(module, key)}
    own = module.state_dict()
    wrong = [
        f"{key} {tuple(state[key].shape)}"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    missing = [key for key in own if key not in state and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in own]
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": wrong}
    said = [f"{len(keys)} {kind} ({_some(keys)})" for kind, keys in problems.items() if keys]
    if said:
        raise ConfigError(
            f"{path} does not fit {module.default_cfg.get('architecture', 'the model')}: {'; '.join(said)}; "
            "check the model's name and --model-kwargs"
        )
    module.load_state_dict(state, strict=False)


def _is_classifier(module: Any, key: str) -> bool:
    """Whether a weight belongs to the classifier, which is not wanted here."""
    names = module.default_cfg.get("classifier") or ()
    names = (names,) if isinstance(names, str) else names
    return any(key.startswith(f"{name}.") for name in names)


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:SHOWN_KEYS]) + (", ..." if len(keys) > SHOWN_KEYS else "")


def _state_digest(module: nn.Module) -> str:
    state = {key: value.detach().contiguous().clone() for key, value in module.state_dict().items()}
    return hashlib.sha256(save(state)).hexdigest()


def _check_feature(backbone: Backbone) -> None:
    try:
        with torch.inference_mode():
            feature = backbone.module(torch.zeros(2, *backbone.config["input_size"]))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0][:200]
        size = "x".join(map(str, backbone.config["input_size"][1:]))
        raise ConfigError(
            f"{backbone.name} does not take pictures of {size}: {reason}; see --image-size"
        ) from error
    if not isinstance(feature, torch.Tensor) or feature.ndim != 2:
        shape = tuple(feature.shape) if isinstance(feature, torch.Tensor) else type(feature).__name__
        raise ConfigError(
            f"{backbone.name} gives no pooled feature: expected (n, L), got {shape}; "
            "choose an image model with a global pooling"
        )
