"""Create timm networks without classifiers, load their weights, and describe them."""

import contextlib
import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import timm
import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from timm.data import resolve_model_data_config
from timm.layers import Conv2dSame
from timm.models import _builder
from torch import Tensor, nn

from export.to_onnx import first_words
from protocol.errors import ConfigError
from protocol.models.onnx_metadata import BackboneMetadata
from protocol.models.preprocessing import Preprocessing
from protocol.storage.blobstore import file_digest

SHOWN_KEYS = 5
COUNTER = "num_batches_tracked"
"""BatchNorm's counter of training steps, which features do not depend on and many files omit."""


Filter = Callable[..., dict[str, Any]]
"""Takes a state dict, and for most networks the network, to a state dict that the network loads."""

FROM_FILE = "protofleet"
"""timm's `source` of weights that `load_weights` loads."""


@dataclass(frozen=True)
class Choice:
    """The chosen network of timm, with exactly one of `weights`, `pretrained` and `random`."""

    model: str
    weights: Path | None = None
    """A safetensors file or PyTorch checkpoint."""
    pretrained: bool = False
    """Download timm's weights from the hub."""
    random: bool = False
    model_kwargs: Mapping[str, Any] | None = None
    image_size: int | None = None
    """Edge of the square input in pixels; None for the network's own, as for what follows."""
    mean: tuple[float, float, float] | None = None
    """The mean of pixels scaled to 0..1."""
    std: tuple[float, float, float] | None = None
    crop_pct: float | None = None


@dataclass(frozen=True)
class Backbone:
    """A frozen network and its description."""

    module: nn.Module
    """Normalized float32 (n, 3, H, W) to float32 (n, L), in evaluation mode."""
    config: Mapping[str, Any]
    """Timm's data config: `input_size`, `interpolation`, `crop_pct`, `crop_mode`, `mean`, `std`."""
    metadata: BackboneMetadata
    """The metadata, still without `parity`."""
    assumed: tuple[str, ...] = ()
    """Names in `settings` that neither the weights file nor the choice gives."""

    @property
    def settings(self) -> dict[str, Any]:
        """The data config, with the padding of convolutions: `same` as in TensorFlow, or `symmetric`."""
        same = any(isinstance(layer, Conv2dSame) for layer in self.module.modules())
        return {**self.config, "padding": "same" if same else "symmetric"}


_Share = Annotated[float, Meta(ge=0, le=1)]
_Positive = Annotated[float, Meta(gt=0, le=1)]


class RecordedConfig(msgspec.Struct, omit_defaults=True):
    """The architecture and data config that weights record; None for a setting that they do not."""

    architecture: str | None = None
    input_size: tuple[Literal[3], int, int] | None = None
    crop_pct: _Positive | None = None
    crop_mode: str | None = None
    interpolation: str | None = None
    mean: tuple[_Share, _Share, _Share] | None = None
    std: tuple[_Positive, _Positive, _Positive] | None = None
    model_args: dict[str, Any] = {}


def list_models(pattern: str) -> list[str]:
    """Return the names of timm's models that match a shell pattern, or contain the text.

    Raises:
        ConfigError: there is none.
    """
    found: list[str] = timm.list_models(pattern if "*" in pattern else f"*{pattern}*")
    if not found:
        raise ConfigError(f"timm has no model like {pattern!r}{_close_to(pattern, timm.list_models())}")
    return found


def load_backbone(choice: Choice) -> Backbone:
    """Create a network with its weights.

    Raises:
        ConfigError: the model does not exist, its weights do not fit or cannot be downloaded, or it does not support
            the image size or has no pooled feature.
    """
    if sum((choice.pretrained, choice.weights is not None, choice.random)) != 1:
        raise ConfigError(
            "choose the weights: --weights FILE, --pretrained (from the hub), "
            "or --random for an untrained network"
        )
    _check_name(choice.model)
    recorded, arguments = _recorded(choice.weights, choice.model) if choice.weights else ({}, {})
    choice = replace(choice, model_kwargs={**arguments, **(choice.model_kwargs or {})})
    with _weight_filters() as filters:
        module = _create(choice, recorded)
    if choice.weights is not None:
        load_weights(module, choice.weights, filters[-1])
    digest = file_digest(choice.weights).hex() if choice.weights else weights_digest(module)
    config = _data_config(module, choice)
    if choice.image_size and hasattr(module, "set_input_size"):
        module.set_input_size(img_size=config["input_size"][1:])
    module.eval()
    source = str(module.pretrained_cfg.get("hf_hub_id") or "hub") if choice.pretrained else "random"
    metadata = BackboneMetadata(
        model=choice.model,
        feature_size=feature_size_of(
            module, choice.model, config["input_size"], hint="try --model-kwargs global_pool=avg"
        ),
        preprocessing=preprocessing_of(config),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        weights_sha256=digest,
        weights=choice.weights.name if choice.weights else source,
    )
    backbone = Backbone(module, config, metadata)
    return replace(backbone, assumed=_assumed(backbone, choice, recorded)) if choice.weights else backbone


@contextlib.contextmanager
def _weight_filters() -> Iterator[list[Filter | None]]:
    """Yield a list of the filters of timm's networks that are created with weights from a file.

    A filter renames weights of the network's authors, and resamples position embeddings for another size of images.
    timm passes it to this function alone.
    """
    load, filters = _builder.load_pretrained, list[Filter | None]()

    def keep_filter(module: nn.Module, *, filter_fn: Filter | None = None, **others: Any) -> None:
        filters.append(filter_fn)
        if others["pretrained_cfg"].get("source") != FROM_FILE:
            load(module, filter_fn=filter_fn, **others)

    _builder.load_pretrained = keep_filter
    try:
        yield filters
    finally:
        _builder.load_pretrained = load


def load_weights(module: Any, path: Path, filter_weights: Filter | None = None) -> None:
    """Load weights into a network that timm created with `num_classes=0`; a classifier in the file is ignored.

    The file is `.safetensors`, or a PyTorch checkpoint with weights only: a state dict, or one under
    `state_dict_ema`, `model_ema`, `state_dict` or `model`.

    Raises:
        ConfigError: the file is neither, or a weight is missing, unexpected or has another shape.
    """
    state = _read(path)
    own = module.state_dict()
    if filter_weights is not None:
        state = _filtered(state, module, filter_weights, path)
    state = {key: value for key, value in state.items() if key in own or not _is_classifier(module, key)}
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
            "check the model's name, --image-size and --model-kwargs"
        )
    module.load_state_dict(state, strict=False)


def _filtered(state: dict[str, Any], module: Any, filter_weights: Filter, path: Path) -> dict[str, Any]:
    try:
        try:
            return filter_weights(state, module)
        except TypeError:  # some take no module
            return filter_weights(state)
    except Exception as error:
        raise ConfigError(
            f"timm cannot adapt {path} to {module.pretrained_cfg['architecture']}: {type(error).__name__} "
            f"{first_words(error)}; check the model's name, --image-size and --model-kwargs"
        ) from error


def weights_digest(module: nn.Module) -> str:
    """Return the hex sha256 of a network's weights as safetensors."""
    state = {
        key: value.detach().clone().contiguous()
        for key, value in module.state_dict().items()
        if isinstance(value, Tensor)  # a module may have an extra state of any type
    }
    return hashlib.sha256(save(state)).hexdigest()


def _check_name(model: str) -> None:
    name, _, tag = model.partition(".")
    if name not in timm.list_models():
        raise ConfigError(f"timm has no model {model!r}{_close_to(name, timm.list_models())}")
    tagged = timm.list_pretrained(f"{name}.*")
    if tag and model not in tagged:
        known = f"expected {' or '.join(tagged)}" if tagged else "it has none"
        raise ConfigError(f"timm has no weights {tag!r} of {name}: {known}")


def _close_to(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else "; look for one with --list PATTERN"


def _recorded(weights: Path, model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config and model arguments that weights record."""
    recorded, source = recorded_config(weights)
    if recorded.architecture not in (None, name := model.partition(".")[0]):
        raise ConfigError(
            f"{source} is of {recorded.architecture!r}, not of {name}: name that MODEL, "
            "or move it to another folder"
        )
    config = msgspec.to_builtins(recorded)
    arguments = config.pop("model_args", {})
    arguments.pop("num_classes", None)
    return config, arguments


def recorded_config(weights: Path) -> tuple[RecordedConfig, Path]:
    """Return the config in a file's metadata, or else in timm's config.json beside it, with the file that has it.

    Raises:
        ConfigError: it cannot be read.
    """
    source, texts = weights, _metadata(weights)
    try:
        record = {
            name: msgspec.json.decode(text) if text.startswith(("[", "{", '"')) else text
            for name, text in texts.items()
        }
        if not record and (beside := weights.with_name("config.json")).is_file():
            source = beside
            record = msgspec.json.decode(beside.read_bytes(), type=dict[str, Any])
        settings = msgspec.convert(record.get("pretrained_cfg", {}), dict[str, Any])
        return msgspec.convert({**record, **settings}, RecordedConfig, strict=False), source
    except (OSError, ValueError, RecursionError) as error:  # DecodeError and others
        raise ConfigError(f"cannot read the preprocessing in {source}: {error}; correct it") from error


def given_config(
    source: str, choice: Choice, recorded: RecordedConfig
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the data config of a network that is not timm's, and the names of what is assumed.

    Raises:
        ConfigError: neither the choice nor the record has the image size, the mean or the std.
    """
    size = None if choice.image_size is None else (3, choice.image_size, choice.image_size)
    known = {
        "input_size": size or recorded.input_size,
        "interpolation": recorded.interpolation,
        "mean": choice.mean or recorded.mean,
        "std": choice.std or recorded.std,
        "crop_pct": choice.crop_pct or recorded.crop_pct,
        "crop_mode": recorded.crop_mode,
    }
    assumed = {"interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "center"}
    options = {"input_size": "--image-size", "mean": "--mean", "std": "--std"}
    if missing := [option for name, option in options.items() if known[name] is None]:
        raise ConfigError(
            f"how images for {source} are preprocessed is not known: give {', '.join(missing)} of its training"
        )
    given = {name: value for name, value in known.items() if value is not None}
    return {**assumed, **given}, tuple(name for name in assumed if name not in given)


def _metadata(weights: Path) -> dict[str, str]:
    """Return what the metadata of a safetensors file has of timm's config; nothing of other files."""
    with contextlib.suppress(OSError, SafetensorError), safe_open(weights, framework="pt") as file:
        names = {"pretrained_cfg", *RecordedConfig.__struct_fields__}
        return {name: text for name, text in (file.metadata() or {}).items() if name in names}
    return {}


def _assumed(backbone: Backbone, choice: Choice, recorded: Mapping[str, Any]) -> tuple[str, ...]:
    arguments = choice.model_kwargs or {}
    given = {
        "input_size": choice.image_size or arguments.get("img_size"),
        "padding": arguments.get("pad_type") or recorded.get("architecture"),
    }
    known = {**vars(choice), **given, **recorded}
    return tuple(name for name in backbone.settings if not known.get(name))


def _create(choice: Choice, recorded: Mapping[str, Any]) -> Any:
    module = _make(choice, dict(choice.model_kwargs or {}), recorded)
    fixed = module.pretrained_cfg.get("fixed_input_size", False)
    if choice.image_size and fixed and not hasattr(module, "set_input_size"):
        # The input size of such a network is set on creation.
        module = _make(choice, {"img_size": choice.image_size, **(choice.model_kwargs or {})}, recorded)
    return module


def _make(choice: Choice, kwargs: dict[str, Any], recorded: Mapping[str, Any]) -> Any:
    try:
        overlay = {name: value for name, value in recorded.items() if name != "architecture"}
        if choice.weights:
            overlay["source"] = FROM_FILE
        fixed = {"pretrained_cfg_overlay": overlay, "num_classes": 0}
        return timm.create_model(choice.model, pretrained=not choice.random, **fixed, **kwargs)
    except Exception as error:
        if choice.pretrained and not isinstance(error, TypeError):
            raise ConfigError(
                f"cannot get the weights of {choice.model} from the hub: {first_words(error)}; "
                "download them on a machine with internet access, and give the file with --weights"
            ) from error
        raise ConfigError(
            f"timm cannot create {choice.model} with {kwargs}: {first_words(error)}; check --model-kwargs"
        ) from error


def _data_config(module: Any, choice: Choice) -> dict[str, Any]:
    """Return timm's data config with the chosen overrides."""
    size = choice.image_size or (choice.model_kwargs or {}).get("img_size")
    overrides = {
        "mean": choice.mean,
        "std": choice.std,
        "crop_pct": choice.crop_pct,
        "input_size": (3, *((size, size) if isinstance(size, int) else size)) if size else None,
    }
    config: dict[str, Any] = resolve_model_data_config(module, args=overrides)
    return config


def preprocessing_of(config: Mapping[str, Any]) -> Preprocessing:
    """Return what devices do for a data config; raises ConfigError if they do not support it."""
    _, height, width = config["input_size"]
    bordered = config["crop_mode"] == "border"
    settings = {
        "height": height,
        "width": width,
        "crop_pct": config["crop_pct"],
        "crop_mode": config["crop_mode"],
        "interpolation": config["interpolation"],
        "fill": [round(255 * value) for value in config["mean"]] if bordered else [0, 0, 0],
    }
    try:
        return msgspec.convert(settings, Preprocessing)
    except msgspec.ValidationError as error:
        raise ConfigError(f"devices do not support the preprocessing of this network: {error}") from error


def feature_size_of(module: nn.Module, model: str, input_size: tuple[int, int, int], *, hint: str) -> int:
    """Return L, from a forward pass; raises ConfigError with a hint if there is no pooled feature."""
    try:
        with torch.no_grad():  # networks keep tensors of it, which `export.layout` computes gradients with
            feature = module(torch.zeros(2, *input_size))
    except Exception as error:
        size = "x".join(map(str, input_size))
        raise ConfigError(
            f"{model} does not support images of {size}: {first_words(error)}; check --image-size"
        ) from error
    if not isinstance(feature, torch.Tensor) or feature.ndim != 2:
        shape = tuple(feature.shape) if isinstance(feature, torch.Tensor) else type(feature).__name__
        raise ConfigError(
            f"{model} returns no pooled feature: expected (2, L) for two images, got {shape}; "
            f"{hint}, or take another model"
        )
    return feature.shape[1]


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
    # Parts of the classifier are beside it: the normalization head.bn, if it is head.linear.
    return any(key.startswith((f"{name}.", f"{name.rpartition('.')[0] or name}.")) for name in names)


def _shape(value: Any) -> str:
    return "x".join(map(str, value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:SHOWN_KEYS]) + (", ..." if len(keys) > SHOWN_KEYS else "")
