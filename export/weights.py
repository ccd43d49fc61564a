"""Load weights from a file into a network."""

import hashlib
from pathlib import Path
from typing import Any

import timm.models
from safetensors.torch import save
from torch import Tensor, nn

from export.to_onnx import first_words
from protocol.errors import ConfigError

SHOWN_KEYS = 5
COUNTER = "num_batches_tracked"
"""BatchNorm's counter of training steps, which features do not depend on and many files omit."""


def load_weights(module: Any, path: Path) -> None:
    """Load weights into a timm network; a classifier in the file is ignored.

    Args:
        module: created by timm with `num_classes=0`.
        path: a `.safetensors` file, or a PyTorch checkpoint with weights only: a state dict, or one under
            `state_dict_ema`, `model_ema`, `state_dict` or `model`.

    Raises:
        ConfigError: the file is neither, or a weight is missing, unexpected or has another shape.
    """
    state = {key: value for key, value in _read(path).items() if not _is_classifier(module, key)}
    own = module.state_dict()
    problems = {
        "missing": [key for key in own if key not in state and not key.endswith(COUNTER)],
        "unexpected": [key for key in state if key not in own and not key.endswith(COUNTER)],
        "of another shape": [
            f"{key} {_shape(state[key])} instead of {_shape(own[key])}"
            for key in own
            if key in state and _shape(state[key]) != _shape(own[key])
        ],
    }
    if found := [f"{len(keys)} {kind} ({_some(keys)})" for kind, keys in problems.items() if keys]:
        raise ConfigError(
            f"{path} does not fit {module.pretrained_cfg['architecture']}: {'; '.join(found)}; "
            "check the model's name and --model-kwargs"
        )
    module.load_state_dict(state, strict=False)


def weights_digest(module: nn.Module) -> str:
    """Return the hex sha256 of a network's weights as safetensors."""
    state = {key: value.detach().clone().contiguous() for key, value in module.state_dict().items()}
    return hashlib.sha256(save(state)).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"no weights at {path}: expected a safetensors file or a PyTorch checkpoint")
    try:
        state: dict[str, Any] = timm.models.load_state_dict(str(path), weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"{path} is neither safetensors nor a PyTorch checkpoint with weights only: {first_words(error)}"
        ) from error
    return state


def _is_classifier(module: Any, key: str) -> bool:
    names = module.pretrained_cfg.get("classifier") or ()
    names = (names,) if isinstance(names, str) else names
    return any(key.startswith(f"{name}.") for name in names)


def _shape(value: Any) -> str:
    return "x".join(map(str, value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:SHOWN_KEYS]) + (", ..." if len(keys) > SHOWN_KEYS else "")
