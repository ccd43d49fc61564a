"""Networks are chosen, loaded and described as timm has them, or refused in one line."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from torch import Tensor

from export.backbones import Choice, list_models, load_backbone
from export.weights import weights_digest
from protocol.errors import ConfigError
from protocol.storage.blobstore import file_digest

MODEL = "test_resnet"
"""timm's own network for tests: 0.5 M parameters, images of 160 x 160."""


def made(name: str = MODEL, *, seed: int = 1) -> Any:
    """A network of timm whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    return timm.create_model(name).eval()


def headless(name: str = MODEL) -> Any:
    """That network without its classifier."""
    module = made(name)
    module.reset_classifier(0)
    return module


def state_of(module: Any) -> dict[str, Tensor]:
    """Its weights, each on its own."""
    return {key: value.clone() for key, value in module.state_dict().items()}


def same_features(left: Any, right: Any, *, edge: int = 160) -> bool:
    """Whether two networks agree on a random image."""
    image = torch.randn(1, 3, edge, edge, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return torch.equal(left(image), right(image))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet", "test_convnext"])
def test_weights_of_a_file_become_the_backbone(tmp_path: Path, name: str) -> None:
    """A safetensors file with its classifier gives the features of the network it was saved from."""
    path = tmp_path / "weights.safetensors"
    save_file(state_of(made(name)), path)

    backbone = load_backbone(Choice(name, weights=path))

    assert same_features(backbone.module, headless(name))
    assert backbone.metadata.feature_size == made(name).num_features
    assert backbone.metadata.weights == "weights.safetensors"
    assert backbone.metadata.weights_sha256 == file_digest(path).hex()


@pytest.mark.parametrize("key", ["state_dict", "model", "model_ema", None])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_torch_checkpoints_of_any_nesting_are_read(tmp_path: Path, key: str | None, prefix: str) -> None:
    """State dicts, bare or inside a training checkpoint, from one device or from many, are read."""
    state = {prefix + name: value for name, value in state_of(made()).items()}
    path = tmp_path / "weights.pth"
    torch.save(state if key is None else {"epoch": 7, key: state}, path)
    assert same_features(load_backbone(Choice(MODEL, weights=path)).module, headless())


def test_counters_of_training_steps_may_be_missing(tmp_path: Path) -> None:
    """A file without BatchNorm's counters fits."""
    path = tmp_path / "weights.safetensors"
    state = {key: value for key, value in state_of(made()).items() if "num_batches" not in key}
    assert len(state) < len(made().state_dict())
    save_file(state, path)
    assert same_features(load_backbone(Choice(MODEL, weights=path)).module, headless())


def test_weights_that_do_not_fit_are_told_apart(tmp_path: Path) -> None:
    """What is missing, what is unexpected and what has another shape are named."""
    state = state_of(made())
    state["other.weight"] = state.pop("conv1.0.weight")
    state["bn1.weight"] = torch.zeros(5)
    path = tmp_path / "weights.safetensors"
    save_file(state, path)
    with pytest.raises(ConfigError) as caught:
        load_backbone(Choice(MODEL, weights=path))
    message = str(caught.value)
    assert "does not fit test_resnet" in message
    assert "1 missing (conv1.0.weight)" in message
    assert "1 unexpected (other.weight)" in message
    assert "1 of another shape (bn1.weight 5 instead of" in message


def test_weights_of_another_network_are_refused_in_one_line(tmp_path: Path) -> None:
    """A hundred wrong names are counted and only the first of them listed."""
    path = tmp_path / "weights.safetensors"
    save_file(state_of(made("test_vit")), path)
    with pytest.raises(ConfigError, match=r"\d+ missing \(.*, \.\.\.\); \d+ unexpected") as caught:
        load_backbone(Choice(MODEL, weights=path))
    assert len(str(caught.value)) < 1000


class Evil:
    """What a pickle could bring along."""


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_files_that_are_no_weights_are_refused(tmp_path: Path, name: str) -> None:
    """Pickled code, garbage and nothing at all are refused without being run."""
    path = tmp_path / name
    with pytest.raises(ConfigError, match="no weights at"):
        load_backbone(Choice(MODEL, weights=path))
    path.write_bytes(b"garbage" * 100)
    with pytest.raises(
        ConfigError, match="neither safetensors nor a torch checkpoint of nothing but weights"
    ):
        load_backbone(Choice(MODEL, weights=path))
    torch.save({"state_dict": Evil()}, path)
    with pytest.raises(
        ConfigError, match="neither safetensors nor a torch checkpoint of nothing but weights"
    ):
        load_backbone(Choice(MODEL, weights=path))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("mobilnetv2_100", "did you mean .*mobilenetv2_100"),
        ("qqqqqqqq", "look for one with --list"),
        ("test_resnet.nothing", r"no weights 'nothing' of test_resnet: expected test_resnet\.r160_in1k"),
    ],
)
def test_unknown_models_are_answered_with_the_closest(model: str, message: str) -> None:
    """A name that timm does not have is met with those it has."""
    with pytest.raises(ConfigError, match=message):
        load_backbone(Choice(model, random=True))


@pytest.mark.parametrize("choice", [Choice(MODEL), Choice(MODEL, random=True, pretrained=True)])
def test_the_source_of_the_weights_has_to_be_said_once(choice: Choice) -> None:
    """A backbone that has learned nothing is nearly always a mistake, so it is made on request alone."""
    with pytest.raises(ConfigError, match=r"--weights FILE, --pretrained .* or --random"):
        load_backbone(choice)


def test_arguments_that_the_model_does_not_take_are_said() -> None:
    """An unknown argument is named."""
    with pytest.raises(ConfigError, match=r"with {'color': 'red'}: .*'color'; check --model-kwargs"):
        load_backbone(Choice(MODEL, random=True, model_kwargs={"color": "red"}))


def test_a_model_without_pooled_feature_is_refused() -> None:
    """Feature maps are no features: the message says what came and how to pool."""
    with pytest.raises(ConfigError, match=r"no pooled feature: .* got \(2, \d+, 5, 5\); .*global_pool=avg"):
        load_backbone(Choice(MODEL, random=True, model_kwargs={"global_pool": ""}))


def test_images_of_a_size_that_the_model_cannot_take_are_refused() -> None:
    """A size that falls to nothing inside the network is an error of one line."""
    with pytest.raises(ConfigError, match="--image-size"):
        load_backbone(Choice("test_convnext", random=True, image_size=8))


def test_the_image_size_moves_the_positions_of_a_transformer(tmp_path: Path) -> None:
    """A vision transformer takes another size than its weights were trained on, as timm resizes it."""
    path = tmp_path / "weights.safetensors"
    save_file(state_of(made("test_vit")), path)
    backbone = load_backbone(Choice("test_vit", weights=path, image_size=96))
    expected = headless("test_vit")
    expected.set_input_size(img_size=(96, 96))
    assert (backbone.metadata.preprocessing.height, backbone.metadata.preprocessing.width) == (96, 96)
    assert same_features(backbone.module, expected, edge=96)


@pytest.mark.parametrize(("size", "height", "width"), [(128, 128, 128), ((96, 128), 96, 128)])
def test_a_size_given_to_the_model_is_that_of_the_images(size: object, height: int, width: int) -> None:
    """`img_size` among the model's arguments is as good as an image size, and need not be square."""
    spec = load_backbone(
        Choice("test_vit", random=True, model_kwargs={"img_size": size})
    ).metadata.preprocessing
    assert (spec.height, spec.width) == (height, width)


def test_images_are_prepared_as_timm_says() -> None:
    """Size, crop, interpolation, mean and std are the model's own."""
    config = timm.get_pretrained_cfg("vit_tiny_patch16_224")
    backbone = load_backbone(Choice("vit_tiny_patch16_224", random=True))
    spec = backbone.metadata.preprocessing
    assert (3, spec.height, spec.width) == config.input_size
    assert (spec.crop_pct, spec.crop_mode) == (config.crop_pct, config.crop_mode)
    assert spec.interpolation == config.interpolation
    assert (backbone.metadata.mean, backbone.metadata.std) == (config.mean, config.std)


def test_a_person_may_know_better() -> None:
    """Mean, std, crop and size override the model's own, in the metadata and in timm's config alike."""
    half = (0.5, 0.5, 0.5)
    backbone = load_backbone(Choice(MODEL, random=True, mean=half, std=half, crop_pct=1.0, image_size=64))
    assert (backbone.metadata.mean, backbone.metadata.std) == (half, half)
    assert backbone.metadata.preprocessing.crop_pct == 1.0
    assert backbone.config["input_size"] == (3, 64, 64)
    assert backbone.config["mean"] == half


def test_borders_have_the_color_that_timm_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where timm pads images, devices pad them with the same color."""
    monkeypatch.setattr(
        "export.backbones.resolve_model_data_config",
        lambda *a, **k: resolve_model_data_config(*a, **k) | {"crop_mode": "border"},
    )
    spec = load_backbone(Choice(MODEL, random=True, mean=(0.485, 0.456, 0.406))).metadata.preprocessing
    assert (spec.crop_mode, spec.fill) == ("border", (124, 116, 104))


def test_digests_tell_weights_apart() -> None:
    """The same weights have the same digest, others another."""
    assert weights_digest(made()) == weights_digest(made())
    assert weights_digest(made()) != weights_digest(made(seed=2))


def test_models_are_listed_by_pattern_and_by_part() -> None:
    """A shell pattern and a part of a name both find models; what finds none is met with the closest."""
    assert "resnet18" in list_models("resnet*")
    assert "seresnet18" not in list_models("resnet*")
    assert "tf_mobilenetv3_small_100" in list_models("mobilenetv3")
    with pytest.raises(ConfigError, match=r"no model like 'resnet18x'; did you mean .*resnet18"):
        list_models("resnet18x")
